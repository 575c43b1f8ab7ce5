"""A model that answers over HTTP, beside calls of the same one in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lezero.core.errors import LeZeroError, OrderError
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.run import Server
from tests.serve.server.running import read_all, serving, slow_steps, small_llm, until

CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("abc"),
    "stream": lambda llm: llm.stream("abc"),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "abc"}]),
    "embed": lambda llm: llm.embed("abc"),
}
FEW = SamplingParams(max_tokens=3)


def test_calls_in_python_are_refused_while_a_server_answers() -> None:
    llm = small_llm()
    asked = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with serving(llm) as client:
        expected = client.complete(**asked).json["choices"][0]["text"]
        with slow_steps(llm) as quick, client.begin(asked) as running:
            until(lambda: llm.engine.busy)
            for call in CALLS.values():
                with pytest.raises(OrderError, match="answers over HTTP; ask its server"):
                    call(llm)
            llm.advance()
            quick.set()
            client.server.stop()
            assert f'"text":"{expected}"'.encode() in read_all(running)
    for call in CALLS.values():
        call(llm)


def test_a_server_is_refused_where_answers_are_under_way() -> None:
    llm = small_llm()
    stream = llm.stream("abc", SamplingParams(max_tokens=9, ignore_eos=True))
    next(stream)
    with pytest.raises(OrderError, match="has answers under way; end them"):
        Server(llm, ServeConfig(port=0)).run()
    assert sum(len(piece.tokens) for piece in stream) == 8
    with serving(llm) as client, pytest.raises(OrderError, match="answers over HTTP"):
        Server(llm, ServeConfig(port=0)).run()
    assert client.server.metrics.failed_steps == 0


def test_a_server_that_does_not_start_leaves_its_model_to_python(monkeypatch: Any) -> None:
    llm = small_llm()
    server = Server(llm, ServeConfig(port=0))

    def broken() -> None:
        raise LeZeroError("no")

    monkeypatch.setattr(server.face, "rehearse", broken)
    with pytest.raises(LeZeroError, match="no"):
        server.run()
    assert llm.generate("abc", FEW)[0].error is None
