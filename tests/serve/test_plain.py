"""Prompts in pieces give what the model gives for them whole, and accelerators are kept busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.core import device
from lezero.serve import plain
from lezero.serve.llm import LLM
from lezero.serve.plain import PlainProgram, most_tokens
from lezero.serve.program import Fed
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts, small

SHAPES: list[dict[str, Any]] = [{}, {"qk_norm": True}, {"sliding_window": 12}, {"kv_heads": 4}]


def ready(**shape: Any) -> PlainProgram:
    """A program whose cache holds no numbers, as a poisoned request leaves it."""
    program = PlainProgram(small(**shape).double())
    program.reserve(40)
    for cache in (program._keys, program._values):
        assert cache is not None
        cache.fill_(torch.nan)
    return program


def whole(program: PlainProgram, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = program._model(torch.tensor([tokens]))[0]
    return found.float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_of_several_prompts_give_what_they_give_whole(shape: dict[str, Any]) -> None:
    program = ready(**shape)
    texts = [*prompts(3, seed=4), list(range(50))]
    blocks = [[31, 2, 7, 30], [5, 4, 3], [20, 21, 22], [9, 1, 8, 6]]
    cuts = [[0, 9, 10, 10, 40], [0, 16, 17, 24, 40], [0, 1, 2, 3, 40], [0, 0, 33, 34, 50]]
    for number in range(4):
        fed, expected = [], []
        for text, held, cut in zip(texts, blocks, cuts, strict=True):
            first, last = cut[number], min(cut[number + 1], len(text))
            if first < last:
                fed.append(Fed(text[first:last], first, held, range(last - first)))
                expected.append(whole(program, text)[first:last])
        torch.testing.assert_close(program.run(fed), torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_a_prompt_from_its_beginning_needs_neither_mask_nor_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, attention = [], plain.F.scaled_dot_product_attention

    def looked(*given: Any, **how: Any) -> Tensor:
        seen.append((how["attn_mask"] is None, how["is_causal"], how["enable_gqa"]))
        return attention(*given, **how)

    program = ready()
    monkeypatch.setattr(plain.F, "scaled_dot_product_attention", looked)
    program.run([Fed(range(20), 0, [3, 1], [19]), Fed([4], 0, [2], [0])])
    assert seen == [(True, True, True), (True, False, True)] * 2  # once a layer
    seen.clear()
    program.run([Fed([4], 20, [3, 1], [0])])
    assert seen == [(True, False, True)] * 2


def test_what_a_step_needs_is_sent_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for layers in (1, 4):
        program, sent = ready(layers=layers), list[Tensor]()
        monkeypatch.setattr(device, "sent", lambda x, place, sent=sent: sent.append(x) or x)
        program.run([Fed(range(20), 0, [3, 1], [19]), Fed([4], 0, [2], [0])])
        program.run([Fed([1], 20, [3, 1], [0]), Fed([4, 2, 1], 1, [2], [0])])
        assert len(sent) == 4


def test_tokens_and_embeddings_are_computed_where_doubles_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(device, "with_doubles", lambda x: asked.append(tuple(x.shape)) or x)
    llm = LLM(small(), weights="fp32")
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    llm.embed([[1, 2, 3, 4]])
    assert asked == [(1, llm.program.vocab), (4, llm.program.config.dim)]


def test_accelerators_take_larger_steps() -> None:
    assert most_tokens(torch.device("cuda")) >= 16 * most_tokens(torch.device("cpu"))
    assert PlainProgram(small()).most_tokens == most_tokens(torch.device("cpu"))
