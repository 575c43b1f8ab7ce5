"""What hostile or broken clients send, and that nobody else notices."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lezero.serve.llm import LLM
from tests.serve.server.running import Client, head, read_all, serving, slow_steps, small_llm, until

READ_S = 1.0
LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return small_llm(max_requests=8)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Client]:
    with serving(llm, name="tiny", read_s=READ_S) as made:
        yield made


def test_a_long_body_is_refused_before_it_is_read(client) -> None:
    with client.connect() as connection:
        connection.sendall(head("/v1/completions", 10 << 20) + b"x" * 1000)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert b"at most 1048576 bytes" in answer


def test_a_long_body_that_is_sent_whole(client) -> None:
    found = client.complete("x" * (10 << 20))
    assert found.status == 413
    assert found.error["code"] == "body_too_long"


def test_a_long_body_in_chunks(client) -> None:
    chunk = b"%x\r\n%b\r\n" % (1 << 16, b"x" * (1 << 16))
    with client.connect() as connection:
        connection.sendall(head("/v1/completions", None, "transfer-encoding: chunked"))
        for _ in range(20):
            connection.sendall(chunk)
        connection.settimeout(20)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "not an object"),
        (b'"x"', "not an object"),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "\\ud800": 1}', "surrogate"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "x", "temperature": -Infinity}', "no JSON number"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "seed": %b}' % (b"9" * 5000), "has a number of more than 4300 digits"),
        (b'{"prompt": "x", "max_tokens": %b}' % (b"9" * 4000), "max_tokens"),
        (b'{"prompt": %b1%b}' % (b"[" * 100, b"]" * 100), "nested"),
        (b'{"prompt": %b}' % (b"[" * 500_000), "nested"),
        (b'{"a":' * 100_000, "nested"),
        (b'{"prompt": "\\u0000", "nope": 1}', "nope"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [[]]}', "prompt"),
        (b'{"prompt": [1, "x"]}', "prompt"),
        (b'{"prompt": [[1.5]]}', "prompt"),
        (b'{"prompt": [99999999999999999999]}', "prompt"),
        (b'{"prompt": {"a": 1}}', "prompt"),
        (b'{"model": ["tiny"], "prompt": "x"}', "model"),
        (b'{"stream": "yes", "prompt": "x"}', "stream"),
        (b'{"prompt": "x", "stop": {"a": "b"}}', "stop"),
        (b'{"prompt": "x", "stop": [1]}', "stop"),
        (b'{"prompt": "x", "top_k": 0}', "top_k"),
        (b'{"prompt": "x", "n": 1e3}', "n"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_bodies_that_are_no_question(client, body, words) -> None:
    found = client.ask("/v1/completions", body)
    assert found.status in (400, 404)
    assert words in found.error["message"]
    assert len(found.body) < 1000


def test_other_ways_to_ask(client) -> None:
    assert client.ask("/nothing").status == 404
    for found in (client.ask("/v1/completions"), client.ask("/v1/models", b"{}")):
        assert found.status == 405
        takes = "GET, HEAD" if b"models" in found.body else "POST"
        assert found.headers["allow"] == takes
    assert client.ask("/v1/completions", b"{}", content_type="text/plain").status == 415
    packed = client.ask("/v1/completions", b"{}", content_encoding="gzip")
    assert packed.status == 415
    assert "content-encoding: got 'gzip'" in packed.error["message"]
    assert client.ask("/v1/models/other").error["code"] == "model_not_found"
    assert client.ask("/health", host="evil.example").status == 421
    assert client.ask("/health", host=f"localhost:{client.port}").status == 200
    assert client.ask("/health", host="localhost.evil.example").status == 421
    assert "access-control-allow-origin" not in client.ask("/v1/models").headers


def test_no_answer_is_kept_on_its_way_or_taken_for_another_kind(client) -> None:
    asked = {"prompt": "x", "max_tokens": 1}
    found = [client.ask(path) for path in ("/", "/health", "/v1/models", "/nothing")]
    found += [client.complete("x", max_tokens=1), client.complete(1.5)]
    found.append(client.ask("/v1/completions", {**asked, "stream": True}))
    for one in found:
        assert one.headers["cache-control"] == "no-store"
        assert one.headers["x-content-type-options"] == "nosniff"


def test_a_target_with_its_host_is_understood(client) -> None:
    """RFC 9112, 3.2.2: the host of the target counts, not that of the header."""

    def status(target: str, host: str = "localhost") -> int:
        lines = [f"GET {target} HTTP/1.1", f"host: {host}", "connection: close", "", ""]
        with client.connect() as made:
            made.sendall("\r\n".join(lines).encode())
            return int(read_all(made).split()[1])

    assert status("http://localhost/health") == 200
    assert status(f"HTTP://127.0.0.1:{client.port}/v1/models?a=http://b/c") == 200
    assert status("https://localhost") == 200, "the page"
    assert status("http://localhost/%68ealth", host="evil.example") == 200
    assert status("http://evil.example/health") == 421
    assert status("http://localhost@evil.example/health") == 421
    assert status("http:///health") == 421
    assert status("/http://localhost/health") == 404


def test_a_proxys_public_name_can_be_allowed() -> None:
    with serving(small_llm(), allow_hosts=("LLM.example.com",)) as client:
        assert client.ask("/health", host="llm.example.com").status == 200
        assert client.ask("/health", host="llm.example.com:443").status == 200
        other = client.ask("/health", host="x.llm.example.com")
        assert other.status == 421
        assert b"got 'x.llm.example.com'" in other.body
        assert client.ask("/health", host="localhost").status == 200


def test_a_slow_sender_of_headers_is_cut_off(client) -> None:
    with client.connect() as connection:
        began = time.monotonic()
        with contextlib.suppress(OSError):  # a reset, or a broken pipe
            while time.monotonic() - began < READ_S + 15:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began < READ_S + 10


def test_a_silent_client_is_cut_off(client) -> None:
    with client.connect() as connection:
        began = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - began < READ_S + 10


def test_a_slow_sender_of_a_body_is_cut_off(client, monkeypatch) -> None:
    monkeypatch.setattr("lezero.serve.server.exchange._LINGER_S", 60)  # it had its time
    with client.connect() as connection:
        connection.sendall(head("/v1/completions", 1000) + b"{")
        connection.settimeout(READ_S + 5)
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")


def test_headers_that_are_no_http(client) -> None:
    bad = (b"\x16\x03\x01\x02\x00\x01" * 50, b"GET / HTTP/x\r\n\r\n", b"x" * 100_000)
    for sent, status in zip(bad, (b"400", b"400", b"431"), strict=True):
        with client.connect() as connection:
            connection.sendall(sent)
            told = read_all(connection)
        first, _, body = told.partition(b"\r\n\r\n")
        if told or len(sent) < 1000:  # else the connection was reset before the answer was read
            assert first.startswith(b"HTTP/1.1 %s " % status)
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert client.ask("/health").status == 200


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after it is refused"])
def test_a_body_that_breaks_http(client, late, caplog) -> None:
    broken = b"\r\nnot a number\r\n"
    begun = head("/other", None, "transfer-encoding: chunked")
    with client.connect() as connection:
        connection.settimeout(20)
        if late:
            connection.sendall(begun)
            told = b""
            while not told.endswith(b"}}"):  # headers and body may come one by one
                told += connection.recv(65536)
            assert told.startswith(b"HTTP/1.1 404 ")
            connection.sendall(broken)
            assert read_all(connection) == b""
        else:
            connection.sendall(begun + broken)
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert client.ask("/health").status == 200
    assert not caplog.records


def test_a_head_whose_body_breaks_http_is_answered_without_a_body(client, caplog) -> None:
    asked = b"HEAD / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
    with client.connect() as connection:
        connection.sendall(asked)
        told = read_all(connection)
    assert told.startswith(b"HTTP/1.1 400 ")
    assert told.endswith(b"\r\n\r\n")
    assert not caplog.records


@pytest.mark.parametrize(
    "late", [b"", b"\r\n", b"GET /health HTTP/1.1\r\n"], ids=["", "a line", "the next request"]
)
def test_a_client_that_leaves_frees_its_blocks(client, llm, late) -> None:
    pool, ended = llm.engine.pool, client.server.metrics.ended
    for stream in (True, False):
        before = ended["cancelled"]
        with slow_steps(llm):
            connection = client.begin({**LONG, "stream": stream})
            until(lambda: pool.used_count > 0)
            connection.sendall(late)
            connection.close()
            began = time.monotonic()
            until(lambda: pool.used_count == 0 and client.server.worker.active == 0)
            assert time.monotonic() - began < 5
        assert ended["cancelled"] == before + 1


def test_much_behind_a_request_cuts_its_client_off(client, llm) -> None:
    before = client.server.metrics.ended["cancelled"]
    with slow_steps(llm), client.begin(LONG) as connection:
        until(lambda: llm.engine.pool.used_count > 0)  # earlier there is nothing to cancel
        with contextlib.suppress(OSError):  # a reset, or a broken pipe
            connection.sendall(b"x" * (1 << 20))
        until(lambda: client.server.worker.active == 0)
        assert read_all(connection) == b""
    assert client.server.metrics.ended["cancelled"] == before + 1


def test_requests_may_be_sent_before_the_answer_to_the_first(client, llm) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    asked = head("/v1/completions", len(body)) + body
    with slow_steps(llm, 0.2) as quick, client.begin(LONG) as connection:
        until(lambda: client.server.worker.active == 1)
        connection.sendall(asked[:50])
        connection.sendall(asked[50:] + asked)
        connection.sendall(head("/v1/completions", len(body), "connection: close") + body)
        quick.set()
        told = read_all(connection)
    assert told.count(b"HTTP/1.1 200 ") == told.count(b'"usage"') == 4


def test_nothing_is_read_behind_a_request_with_two_lengths(client) -> None:
    """RFC 9112, 6.1: something between may have taken the other one."""
    body = b'c\r\n{"prompt":1}\r\n0\r\n\r\n'
    with client.connect() as connection:
        connection.settimeout(20)
        asked = head("/v1/completions", len(body), "transfer-encoding: chunked") + body
        connection.sendall(asked + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        told = read_all(connection)
    assert told.startswith(b"HTTP/1.1 400 ")
    assert told.count(b"HTTP/1.1") == told.lower().count(b"connection: close") == 1


def test_empty_lines_between_requests_are_no_request(client) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    asked = head("/v1/completions", len(body)) + body + b"\r\n"
    with client.connect() as connection:
        connection.settimeout(20)
        connection.sendall(b"\r\n" + asked)
        told = b""
        while b'"usage"' not in told:
            piece = connection.recv(1 << 16)
            assert piece, told
            told += piece
        connection.sendall(b"\n\r")
        connection.sendall(b"\n" + asked + b"GET /health HTTP/1.0\r\n\r\n")
        told += read_all(connection)
    assert told.count(b"HTTP/1.1 ") == told.count(b"HTTP/1.1 200 ") == 3


def test_what_comes_behind_the_last_request_is_ignored(client, llm) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    with client.connect() as connection, slow_steps(llm) as quick:
        connection.sendall(head("/v1/completions", len(body), "connection: close") + body)
        until(lambda: client.server.worker.active == 1)
        connection.sendall(b"\r\nGET /health HTTP/1.0\r\n\r\n")
        quick.wait(0.2)
        quick.set()
        told = read_all(connection)
    assert told.count(b"HTTP/1.1 ") == told.count(b'"usage"') == 1


def test_a_client_that_resets_frees_its_blocks(client, llm) -> None:
    before = client.server.metrics.ended["cancelled"]
    with slow_steps(llm):
        connection = client.begin({**LONG, "stream": True})
        until(lambda: llm.engine.pool.used_count > 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        until(lambda: llm.engine.pool.used_count == 0)
    assert client.server.metrics.ended["cancelled"] == before + 1


def test_a_full_queue_says_when_to_come_again() -> None:
    with (
        serving(small_llm(max_requests=1), queue=1) as client,
        slow_steps(client.server.llm),
    ):
        first = [client.begin({**LONG, "stream": True}) for _ in range(2)]
        until(lambda: client.server.worker.active == 2)
        found = client.complete("x")
        assert found.status == 429
        assert found.error["code"] == "queue_full"
        assert int(found.headers["retry-after"]) >= 1
        assert client.complete("x", n=3).status == 400
        for connection in first:
            connection.close()
        until(lambda: client.server.worker.active == 0)
        assert client.complete("x").status == 200


def test_a_request_that_takes_too_long() -> None:
    with serving(small_llm(longest=4096), request_s=0.1) as client, slow_steps(client.server.llm):
        asked = {**LONG, "max_tokens": 4000}
        found = client.ask("/v1/completions", asked)
        assert found.status == 504
        streamed = client.ask("/v1/completions", {**asked, "stream": True}).body.decode()
        last = json.loads(streamed.strip().splitlines()[-1].removeprefix("data: "))
        assert "not ended" in last["error"]["message"]
        until(lambda: client.server.llm.engine.pool.used_count == 0)


def test_a_reader_that_does_not_read_is_cut_off() -> None:
    with serving(small_llm(longest=4096), write_s=0.3) as client, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", client.port))
        asked = {**LONG, "max_tokens": 4000, "n": 8, "stream": True, "logprobs": 20}
        body = json.dumps(asked).encode()
        connection.sendall(head("/v1/completions", len(body)) + body)
        until(lambda: client.server.worker.active == 8)
        until(lambda: client.server.worker.active == 0 and client.server.app.active == 0, 20)
        assert client.server.metrics.ended["cancelled"] == 8


def test_more_connections_than_are_taken_are_told_in_the_usual_shape() -> None:
    with serving(small_llm(longest=8192), connections=2) as client:
        asked = {**LONG, "max_tokens": 8000, "stream": True}
        with slow_steps(client.server.llm), client.begin(asked), client.begin(asked):
            until(lambda: client.server.worker.active == 2)
            assert client.ask("/ready").status == 503
            found = client.complete("abc", max_tokens=2)
            assert found.status == 503
            assert found.error["code"] == "overloaded"
            assert found.headers["retry-after"] == "1"
        until(lambda: client.complete("abc", max_tokens=2).status == 200)


def test_silent_connections_give_way_though_nobody_else_comes(monkeypatch) -> None:
    monkeypatch.setattr("lezero.serve.server.connection._SILENT_S", 0.5)
    with serving(small_llm(), connections=4) as client, ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(client.connect())
        until(lambda: client.server.app.connections() == 4)


def test_silent_connections_give_way_to_those_who_ask(monkeypatch) -> None:
    limit = "lezero.serve.server.connection._SILENT_S"
    monkeypatch.setattr(limit, 60)
    with serving(small_llm(longest=8192), connections=4) as client, ExitStack() as stack:
        stack.enter_context(slow_steps(client.server.llm))
        running = stack.enter_context(client.begin({**LONG, "max_tokens": 8000, "stream": True}))
        until(lambda: client.server.worker.active == 1)
        for sent in (b"", b"POST /v1", head("/v1/completions", 1000)):
            stack.enter_context(client.connect()).sendall(sent)
        until(lambda: client.server.app.active == 2)
        for _ in range(3):
            stack.enter_context(client.connect())
        until(lambda: client.server.app.connections() == 7)
        assert client.ask("/ready").status == 503, "they may still ask"
        monkeypatch.setattr(limit, 0)
        assert client.complete("abc", max_tokens=2).status == 200
        assert client.server.app.connections() <= 4
        assert client.ask("/health").status == 200
        assert running.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert client.server.worker.active == 1, "who asked before is still answered"
