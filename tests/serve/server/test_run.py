"""An orderly beginning and end, metrics, and the command."""

from __future__ import annotations

import importlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from lezero.cli.main import main
from lezero.core import device
from lezero.data.tokenizer import bytes_tokenizer
from lezero.models import save_hf
from lezero.ops.decoder import native
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.run import Server
from tests.serve.models import small
from tests.serve.server.running import (
    Client,
    head,
    read_all,
    serving,
    slow_steps,
    small_llm,
    until,
)
from tests.train.runs import filled_cache, measured_machine

__all__ = ["filled_cache", "measured_machine"]
pytestmark = pytest.mark.usefixtures("measured_machine")


LONG = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True}


def test_running_answers_end_first() -> None:
    with serving(small_llm()) as client, slow_steps(client.server.llm, 0.2) as quick:
        running = client.begin(LONG)
        until(lambda: client.server.llm.engine.pool.used_count > 0)
        assert client.ask("/ready").status == 200
        client.server.stop()
        until(lambda: client.server.app.draining)
        assert client.ask("/ready").json == {"status": "draining"}
        assert client.ask("/ready").status == 503
        assert client.ask("/stats").json["draining"] is True
        assert client.ask("/health").status == 200
        refused = client.complete("x")
        assert refused.status == 503
        assert refused.headers["retry-after"] == "5"
        quick.set()
        with running:
            told = read_all(running)
    assert b"data: [DONE]" in told
    assert told.count(b'"text"') > 200


@pytest.mark.parametrize("again", [False, True], ids=["the time is over", "a second signal"])
def test_what_does_not_end_is_told_so(again: bool) -> None:
    with (
        serving(small_llm(longest=8192), drain_s=60 if again else 0.1) as client,
        slow_steps(client.server.llm),
    ):
        running = client.begin({**LONG, "max_tokens": 8000})
        until(lambda: client.server.llm.engine.pool.used_count > 0)
        client.server.stop()
        if again:
            client.server.stop()
        with running:
            told = read_all(running)
    assert b"the server is shutting down" in told
    assert b"[DONE]" not in told


@pytest.mark.parametrize("again", [False, True], ids=["the time is over", "a second signal"])
def test_a_question_of_which_half_has_come_is_told_so(again: bool) -> None:
    with serving(small_llm(), drain_s=60 if again else 0.1) as client, client.connect() as made:
        made.sendall(head("/v1/completions", 100) + b'{"prompt"')
        until(lambda: client.server.app.active == 1)
        client.server.stop()
        if again:
            client.server.stop()
        told = read_all(made)
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 5\r\n" in told
    assert b"the server is shutting down" in told


@pytest.mark.parametrize("when", ["before it runs", "while it rehearses"])
def test_a_server_that_is_stopped_before_it_serves_ends(when: str, monkeypatch) -> None:
    server = Server(small_llm(), ServeConfig(port=0))
    begun, gate, rehearse = threading.Event(), threading.Event(), server.face.rehearse

    def slow() -> None:
        begun.set()
        assert gate.wait(20)
        rehearse()

    monkeypatch.setattr(server.face, "rehearse", slow)
    thread = threading.Thread(target=server.run)
    if when == "before it runs":
        server.stop()
        gate.set()
    thread.start()
    assert begun.wait(20)
    if when == "while it rehearses":
        server.stop()
        gate.set()
    thread.join(20)
    ended = not thread.is_alive()
    server.stop()
    thread.join(20)
    assert ended


def test_metrics() -> None:
    with serving(small_llm(speculate="lookup"), name='the "best"') as client:
        assert client.ask("/v1/models/the%20%22best%22").status == 200
        for _ in range(2):
            assert client.complete("abc" * 30, max_tokens=20, temperature=0).status == 200
        client.ask("/nothing/here")
        found = client.ask("/metrics")
        assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
        values = parse_metrics(found.body.decode())
        stats = client.ask("/stats").json
    assert values['lezero_http_requests_total{route="/v1/completions",status="200"}'] == 2
    assert values['lezero_http_requests_total{route="/v1/models/{model}",status="200"}'] == 1
    assert values['lezero_http_requests_total{route="other",status="404"}'] == 1
    assert values["lezero_prompt_tokens_total"] == 180
    assert values["lezero_generated_tokens_total"] == 40
    assert values["lezero_prefix_hit_tokens_total"] > 0
    assert values["lezero_first_token_seconds_count"] == 2
    assert values['lezero_first_token_seconds_bucket{le="+Inf"}'] == 2
    assert values["lezero_between_tokens_seconds_count"] > 0
    assert values["lezero_cache_blocks_used"] == 0
    assert values["lezero_cache_blocks"] == stats["cache_blocks"] > 0
    assert not re.search(r"# TYPE \S+_total gauge", found.body.decode())
    assert values["lezero_accepted_tokens_total"] <= values["lezero_drafted_tokens_total"]
    assert values['lezero_requests_ended_total{reason="length"}'] == 2
    assert stats["tokens_out"] == 40
    assert stats["first_token_s"]["p50"] > 0


def test_a_prompt_counts_once_its_answer_has_begun() -> None:
    asked = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    with serving(small_llm(longest=8192, max_requests=1)) as client:
        with slow_steps(client.server.llm), client.begin({"prompt": "abc" * 20, **asked}):
            until(lambda: client.ask("/stats").json["tokens_out"] > 0)
            with client.begin({"prompt": "xyz" * 900, **asked}):
                until(lambda: len(client.server.worker.engine.scheduler.waiting) == 1)
            until(lambda: client.server.worker.metrics.ended["cancelled"] == 1)
            assert client.ask("/stats").json["tokens_in"] == 60
        assert client.complete("abc" * 20, max_tokens=1).status == 200
        values = parse_metrics(client.ask("/metrics").body.decode())
    assert values["lezero_prompt_tokens_total"] == 120
    assert values["lezero_prefix_hit_tokens_total"] == 48


def parse_metrics(text: str) -> dict[str, float]:
    """Each line as the exposition format has it."""
    values = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP|TYPE) lezero_[a-z_]+ .+", line)
            continue
        found = re.fullmatch(
            r'(lezero_[a-z_]+(?:\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})?) (\S+)', line
        )
        assert found, line
        values[found[1]] = float(found[2])
    return values


def started(folder: Path, *before: str) -> tuple[subprocess.Popen[str], list[str], str]:
    """`lz serve` of a small model after the words `before`, what it said, and its address."""
    tokenizer = bytes_tokenizer()
    tokenizer.save(folder / "tokenizer")
    save_hf(small(vocab=tokenizer.vocab_size), folder / "tiny", folder / "tokenizer")
    words = ["serve", str(folder / "tiny"), "--port", "0", "--context", "256", "--cache-mib", "8"]
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "lezero", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith("serving"):
        lines.append(process.stdout.readline())
        assert lines[-1], "it ended before it served"
    return process, lines, re.findall(r"http://\S+:\d+", lines[-1])[0]


@pytest.mark.usefixtures("not_under_nohup")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_the_command_serves_and_ends_with_status_0(tmp_path: Path, ending: int) -> None:
    process, lines, url = started(tmp_path)
    assert process.stdout is not None
    with process.stdout:
        answer = ask(url, {"prompt": "abc", "max_tokens": 40, "ignore_eos": True})
        assert answer["model"] == "tiny"
        assert answer["usage"]["completion_tokens"] == 40
        client, many = client_of(url), {**LONG, "max_tokens": 250, "n": 8, "logprobs": 20}
        with client.begin(many) as running:
            told = running.recv(65536)
            process.send_signal(ending)
            until(lambda: client.ask("/ready").json == {"status": "draining"})
            told += read_all(running)
        assert told.count(b'"finish_reason":"length"') == 8
        assert b"data: [DONE]" in told
        rest = ""
        for line in process.stdout:
            rest += line
            process.send_signal(ending)  # whoever asks again gets the same status
    assert process.wait(20) == 0
    check_forecast(lines, rest)
    assert "9 requests, 27 tokens in, 2040 out" in rest
    assert re.search(
        r"drawn +[\d,]+ tokens/s for one alone where chance .* of what was tried", rest
    )
    assert any(line.startswith("tried       tokens/s of one request: ") for line in lines)


def test_a_server_under_nohup_goes_on_when_its_terminal_closes(tmp_path: Path) -> None:
    process, _, url = started(tmp_path, "nohup")
    assert process.stdout is not None
    with process.stdout:
        process.send_signal(signal.SIGHUP)
        assert ask(url, {"prompt": "abc", "max_tokens": 2})["model"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert "1 requests" in process.stdout.read()
    assert process.wait(20) == 0


def check_forecast(lines: list[str], rest: str) -> None:
    """Every line of it came before the address; what it costs that bits do not depend on neighbours
    too, where kernels run; and at the end what of the memory was taken."""
    on_cpu = device.device().type == "cpu"
    told = [
        *(r"weights +[\d.]+ [KMG]iB", r"cache +[\d.]+ [KMG]iB: \d+ requests of 256 tokens, "),
        *(r"keys/values \w+", r"workspace +[\d.]+ [KMG]iB"),
        *(rf"{name} +at most [\d,]+ tokens/s" for name in ("decode", "prefill")),
    ]
    if on_cpu and native.NATIVE.available():
        told += [r"invariance  time of products over torch's own.* for 1 row .* for 16 rows "]
        told += [r"            (so it costs time for \d+ row|no cost)"]
    places = [[at for at, line in enumerate(lines) if re.match(one, line)] for one in told]
    assert [len(found) for found in places] == [1] * len(told)
    assert places == sorted(places)
    assert lines[-1].startswith("serving ")
    memory = r"\nmemory +[\d.]+ [MG]iB taken; forecast [\d.]+ [MG]iB with the cache that was used, "
    assert (re.search(memory, rest) is not None) == on_cpu


def test_a_low_limit_of_open_files_leaves_room_for_those_who_ask(tmp_path: Path) -> None:
    process, _, url = started(tmp_path, "sh", "-c", 'ulimit -n 128; exec "$0" "$@"')
    assert process.stdout is not None
    with process.stdout, ExitStack() as stack:
        began = time.monotonic()
        for _ in range(150):
            stack.enter_context(client_of(url).connect())
        until(lambda: client_of(url).ask("/health").status == 200, 40)
        assert time.monotonic() - began < 19, "before they are cut off as too slow"
        # Those who asked nothing may not all have come in yet: some are turned away until then.
        until(lambda: ask(url, {"prompt": "abc", "max_tokens": 4}).get("model") == "tiny", 40)
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.wait(20) == 0


def client_of(url: str) -> Client:
    class Found:
        pass

    server = Found()
    server.url = url  # type: ignore[attr-defined]
    return Client(server)  # type: ignore[arg-type]


def ask(url: str, data: dict[str, object]) -> dict:
    return json.loads(client_of(url).ask("/v1/completions", data).body)


def test_the_command_makes_keys(capsys) -> None:
    assert main(["serve", "--new-key", "alice"]) == 0
    assert re.search(r"alice sha256:[0-9a-f]{64}$", capsys.readouterr().out.strip())


def test_a_file_of_keys_that_is_not_there_is_named_once(tmp_path, capsys) -> None:
    path = tmp_path / "none"
    assert main(["serve", "x", "--keys", str(path)]) == 1
    said = capsys.readouterr().err
    assert said == f"error: {path}: the API keys cannot be read (No such file or directory)\n"


@pytest.mark.parametrize("words", [["{}"], [".", "--speculate", "draft", "--draft", "{}"]])
def test_a_model_that_is_not_there_is_told_before_the_machine_is_measured(
    words, tmp_path, capsys, monkeypatch
) -> None:
    def measure() -> None:
        raise AssertionError("it takes half a minute")

    # The package has a function of the module's name.
    module = importlib.import_module("lezero.profiler.hardware")
    monkeypatch.setattr(module, "hardware", measure)
    place = str(tmp_path / "none")
    assert main(["serve", *(word.format(place) for word in words), "--port", "0"]) == 1
    assert capsys.readouterr().err == f"error: {place}: no such file or folder\n"


def test_a_port_that_is_taken_is_told_before_a_model_is_opened(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (["no-such-model"], ["--module", "no.such:module"]):
            assert main(["serve", *words, "--port", port]) == 2
            assert "cannot be listened on" in capsys.readouterr().err


NO_NAMES = ("http://x", "https://llm.example.com", "llm.example.com:443", "*", "", "a b", "x/y")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "model: got none"),
        (["x", "--host", "0.0.0.0"], "--public-without-keys"),
        (["x", "--host", "0.0.0.0"], "lz serve --new-key NAME"),
        (["--new-key", ""], "name of the key: got ''"),
        (["x", "--port", "99999"], "--port: got 99999"),
        (["x", "--cache-mib", "0"], "--cache-mib: got 0"),
        (["x", "--body-kib", "0"], "--body-kib"),
        *((["x", "--allow-host", name], "allowed is a bare name") for name in NO_NAMES),
    ],
)
def test_the_command_refuses(words, message, capsys) -> None:
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err
