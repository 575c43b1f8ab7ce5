"""Embeddings through the engine: right, and the same whatever is beside them."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import pytest
import torch

from lezero.core.errors import ConfigError, NumericsError
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts, small
from tests.serve.server.running import coder


def given() -> list[list[int]]:
    return [*prompts(20, longest=60), prompts(1, seed=9)[0] * 15, [7]]


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_the_mean_of_the_final_states_with_length_1(weights: Any) -> None:
    model, expected = small(), []
    final: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: final.append(output))
    for prompt in given():
        model(torch.tensor([prompt]))
        expected.append(torch.nn.functional.normalize(final.pop()[0].mean(0), dim=0))
    found = torch.tensor(LLM(small(), weights=weights).embed(given()))
    assert found.shape == (22, 64)
    assert (found - torch.stack(expected)).abs().max() < (1e-5 if weights == "fp32" else 0.02)
    assert (found.norm(dim=1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_bitwise_the_same_alone_together_and_beside_answers(weights: Any) -> None:
    llm = LLM(small(), weights=weights)
    together = llm.embed(given())
    params = SamplingParams(max_tokens=40, seed=2)
    plain = llm.generate(given()[:3], params)
    tight = LLM(small(), weights=weights, cache_bytes=34 * llm.program.block_bytes)
    running = [tight.request(p, params) for p in given()[:3]]
    for request in running:
        tight.engine.add(request)
    for index in reversed(range(len(given()))):
        tight.engine.step()
        assert tight.embed([given()[index]]) == [together[index]]
    while tight.engine.busy:
        tight.engine.step()
    assert [request.answer for request in running] == [answer.tokens for answer in plain]
    assert sum(request.preemptions for request in running) > 0
    for one in (llm, tight):
        one.engine.scheduler.check()
        assert one.engine.pool.used_count == 0


def test_texts_are_embedded_as_their_tokens() -> None:
    llm = LLM(small(vocab=257), weights="bf16", coder=coder())
    assert llm.embed("abc") == llm.embed([[97, 98, 99]])
    assert len(llm.embed(["abc", "d"])) == 2
    for start in ((), (7,)):
        llm.coder.start_tokens = start  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match=r"prompts\[1\]: got an empty text"):
            llm.embed(["abc", ""])
        with pytest.raises(ConfigError, match=r"prompts\[0\]: got an empty text"):
            llm.embed("")


def test_what_has_no_embedding_is_refused() -> None:
    model = small()
    with torch.no_grad():
        model.embed_tokens.weight[5] = math.nan
    llm = LLM(model, weights="bf16", context=100)
    with pytest.raises(ConfigError, match=r"prompts\[1\]: got 101 tokens, allowed is 1 to 100"):
        llm.embed([[1, 2], [3] * 101])
    with pytest.raises(ConfigError, match=r"prompts\[0\]: got 0 tokens"):
        llm.embed([[], [1]])
    with pytest.raises(NumericsError, match=r"prompts\[1\]"):
        llm.embed([[1], [5]])
    assert llm.engine.pool.used_count == 0


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("what", ["allocate", "release", "states"])
@pytest.mark.parametrize("nth", [1, 3])
def test_ctrl_c_leaves_no_block(what: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(small(), weights="bf16")
    wanted = llm.embed(given())
    place: Any = llm.program if what == "states" else llm.engine.pool
    real, calls = getattr(place, what), []

    def pressing(*asked: Any) -> Any:
        calls.append(1)
        found = real(*asked)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(place, what, pressing)
    with pytest.raises(KeyboardInterrupt):
        llm.embed(given())
    if what == "states":
        assert len(calls) == nth, "the step that runs is the last one"
    assert llm.engine.pool.used_count == 0
    assert llm.embed(given()) == wanted
