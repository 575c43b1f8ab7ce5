"""What a refused request tells its client: the field as the client wrote it, and a code."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from lezero.core.errors import ConfigError
from lezero.serve.sampling import SamplingParams
from lezero.serve.server.asked import read_asked
from lezero.serve.server.exchange import parse
from lezero.serve.server.problem import Problem, refused
from tests.serve.server.running import Client, read_all, serving, slow_steps, small_llm, until

TOO_LONG = "context_length_exceeded"


@pytest.mark.parametrize(
    ("letters", "tokens", "param"), [(400, 5, "prompt"), (5, 400, "max_tokens"), (600, 5, "prompt")]
)
def test_whatever_is_too_long_has_one_code(letters: int, tokens: int, param: str) -> None:
    """The cache may be shorter than the context."""
    llm = small_llm(cache_bytes=100_000)
    assert 300 < llm.room < 400
    with pytest.raises(ConfigError) as found:
        llm.generate("a" * letters, SamplingParams(max_tokens=tokens))
    told = refused(found.value)
    assert (told.code, told.param) == (TOO_LONG, param)


@pytest.mark.parametrize(
    ("name", "value"), [("stop", [["context"]]), ("top_p", "context"), ("temperature", "together")]
)
def test_no_words_of_a_client_make_it_too_long(name: str, value: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(Problem) as found:
        read_asked("chat", {"messages": messages, name: value}, "m")
    assert (found.value.code, found.value.param) == (None, name)


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 2.0), ("seed", 1.5), ("logprobs", True), ("n", 129)]
)
def test_a_number_that_is_not_whole_is_told_so(name: str, value: Any) -> None:
    with pytest.raises(Problem, match=rf"^{name}: got {value}, allowed are whole numbers from "):
        read_asked("text", {"prompt": "x", name: value}, "m")


def test_a_limit_is_looked_at_beside_the_other_one() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    names = ("max_tokens", "max_completion_tokens")
    for wrong in names:
        with pytest.raises(Problem, match=rf"^{wrong}: got 'abc'"):
            read_asked("chat", {**body, **dict.fromkeys(names, 2), wrong: "abc"}, "m")
    asked = read_asked("chat", {**body, "max_tokens": 2, "max_completion_tokens": 3}, "m")
    assert asked.params.max_tokens == 3


@pytest.mark.parametrize("name", ["include_usage", "include_obfuscation", "continuous_usage_stats"])
def test_options_of_a_stream_are_true_or_false(name: str) -> None:
    options = {"prompt": "x", "stream": True, "stream_options": {name: "no"}}
    with pytest.raises(Problem, match=rf"^{name}: got 'no', allowed are true and false"):
        read_asked("text", options, "m")


@pytest.mark.parametrize(("n", "best_of"), [(None, 1), (1, 1), (3, 3)])
def test_the_best_of_as_many_as_are_given(n: int | None, best_of: int) -> None:
    body = {"prompt": "x", "n": n, "best_of": best_of}
    assert read_asked("text", body, "m").n == (n or 1)
    for other in (best_of + 1, best_of - 1, True):
        with pytest.raises(Problem, match=r"^best_of: not supported"):
            read_asked("text", {**body, "best_of": other}, "m")


def test_a_prompt_is_called_as_the_client_calls_it() -> None:
    with serving(small_llm(), name="tiny") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for ask, param in (
            (lambda: client.completions.create(model="tiny", prompt="x" * 600), "prompt"),
            (lambda: client.completions.create(model="tiny", prompt=["x", "x" * 600]), "prompt[1]"),
            (lambda: client.completions.create(model="tiny", prompt=[[1], [999]]), "prompt[1]"),
            (
                lambda: client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "x" * 600}]
                ),
                "messages",
            ),
        ):
            with pytest.raises(openai.BadRequestError) as found:
                ask()
            assert found.value.param == param
            assert str(found.value.body["message"]).startswith(f"{param}: ")
        client.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a", None], r"prompts\[1\]: got NoneType, allowed are text or tokens"),
        (["a", "b" * 600], r"prompts\[1\]: got 600 tokens"),
        (["b" * 600], r"prompt: got 600 tokens"),
        ([1, 2.0], r"prompt: holds 2\.0, allowed are text or whole numbers"),
        (["a", 1], r"prompts\[1\]: got int, allowed are text or tokens"),
        ([1, "a"], r"prompt: holds 'a', allowed are text or whole numbers"),
    ],
)
def test_of_several_prompts_the_wrong_one_is_named(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small_llm().generate(given, SamplingParams(max_tokens=2))


def test_a_health_check_needs_no_host() -> None:
    """HAProxy's, unless told otherwise; a browser always sends one, and so does HTTP/1.1."""

    def answer(client: Client, head: bytes) -> bytes:
        with client.connect() as made:
            made.sendall(head + b"\r\n\r\n")
            return read_all(made)[:12]

    with serving(small_llm()) as client:
        assert answer(client, b"OPTIONS /health HTTP/1.0") == b"HTTP/1.1 405"
        assert answer(client, b"GET /health HTTP/1.0") == b"HTTP/1.1 200"
        assert answer(client, b"GET /health HTTP/1.0\r\nhost:") == b"HTTP/1.1 421"
        assert answer(client, b"GET http://evil.example/health HTTP/1.0") == b"HTTP/1.1 421"
        assert answer(client, b"GET /health HTTP/1.1") == b"HTTP/1.1 400"


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        (b"", 400, "Missing mandatory Host: header"),
        (b"host: localhost\r\ncontent-length: abc\r\n", 400, "bad Content-Length"),
        (b"host: localhost\r\nX : a\r\n", 400, "illegal header line"),
        # Without an end, and little too long: what nobody has read would reset the connection.
        (b"host: localhost\r\nx: " + 65_536 * b"a", 431, "more than 65536 bytes of headers"),
    ],
)
def test_what_is_no_http_is_told_why(headers: bytes, status: int, says: str) -> None:
    with serving(small_llm()) as client, client.connect() as made:
        made.sendall(b"POST /v1/completions HTTP/1.1\r\n" + headers + b"\r\n")
        found = read_all(made).decode()
        assert found.startswith(f"HTTP/1.1 {status} ")
        assert f"this is no HTTP request: {says}" in found


def test_a_name_that_a_body_has_twice_is_refused() -> None:
    for body in (b'{"prompt": "x", "prompt": "y"}', b'{"a": [{"b": 1, "c": 2, "b": 1}]}'):
        with pytest.raises(Problem, match=r"^the body has '(prompt|b)' twice in one object"):
            parse(body)
    assert parse(b'{"a": {"a": 1}, "b": [{"a": 1}, {"a": 2}]}')["a"] == {"a": 1}


def test_a_queue_with_too_little_room_says_how_much_there_is() -> None:
    long = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
    with (
        serving(small_llm(max_requests=1), queue=1) as client,
        slow_steps(client.server.llm),
        client.begin(long),
    ):
        until(lambda: client.server.worker.active == 1)
        said = "the server has 1 of the 2 requests it takes, and this asks for 2; try again later"
        assert client.complete("x", n=2).error["message"] == said
        with client.begin(long):
            until(lambda: client.server.worker.active == 2)
            for found in (client.complete("x"), client.ask("/v1/embeddings", {"input": "x"})):
                said = "the server has 2 of the 2 requests it takes; try again later"
                assert found.error["message"] == said
