"""Prompts in other number formats than answers: where tokens are the same, bits are the same."""

from __future__ import annotations

import pytest

from lezero.ops.decoder import Decoder
from lezero.ops.decoder.native import NATIVE
from lezero.serve import LLM, SamplingParams
from lezero.serve.blocks import BlockPool
from lezero.serve.program import Fed, split_prompts
from lezero.serve.request import Request
from tests.ops.test_decoder_tiles import KERNELS
from tests.ops.test_decoder_tiles import pytestmark as needs_tiles
from tests.serve.models import prompts, small

PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX, emulated where there is none."""
    if NATIVE.available() and NATIVE.kernel_name() == "amx":
        return
    NATIVE.load(KERNELS[0])
    monkeypatch.setattr(NATIVE, "_kernel", KERNELS[0])
    monkeypatch.setattr(Decoder, "rounds", True)


def test_parts_of_prompts_and_the_rest() -> None:
    fed = [
        Fed([1], 7, [3], [0]),
        Fed([1, 2, 3, 4], 0, [1], [1, 2, 3], prompt=3),
        Fed([5, 6], 2, [2], [1], prompt=9),
        Fed([7, 8], 4, [2], []),
    ]
    of_prompts, rest, order = split_prompts(fed)
    assert of_prompts == [Fed([1, 2, 3], 0, [1], [1, 2]), Fed([5, 6], 2, [2], [1])]
    assert rest == [Fed([1], 7, [3], [0]), Fed([4], 3, [1], [0]), Fed([7, 8], 4, [2], [])]
    assert order == [3, 0, 1, 4, 2]


def test_blocks_of_other_kinds_have_other_names() -> None:
    for apart in (False, True):
        pool = BlockPool(8, 4, prompts_apart=apart)
        answer = Request("a", [1, 2, 3, 4, 5, 6])
        answer.tokens += [7, 8, 9]
        answer.blocks, answer.computed = pool.allocate(3), 9
        pool.publish(answer)
        pool.check()
        follows = Request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])
        assert pool.match(follows) == answer.blocks[: 1 if apart else 2]
        again = Request("c", [1, 2, 3, 4, 5, 6])
        again.tokens += [7, 8, 9]
        assert pool.match(again) == answer.blocks[:2]


@needs_tiles
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_an_answer_is_the_same_bit_for_bit_whatever_is_in_the_cache(weights, apart) -> None:
    def made(blocks: int = 0) -> LLM:
        room = blocks * LLM(small(), weights=weights).program.block_bytes
        return LLM(small(), weights=weights, cache_bytes=room or None)

    llm, given = made(), [[1, 2, 3] * 12 + prompt for prompt in prompts(6, longest=60)]
    assert llm.program.prompts_apart
    first = llm.generate(given, PARAMS)
    turns = [[*prompt, *answer.tokens, 3, 5] for prompt, answer in zip(given, first, strict=True)]
    second = llm.generate(turns, PARAMS)
    assert all(answer.cached_tokens >= 32 for answer in second)
    for prompt, answer in zip([*given, *turns], [*first, *second], strict=True):
        (alone,) = made().generate([prompt], PARAMS)
        assert (alone.tokens, alone.logprobs) == (answer.tokens, answer.logprobs)
    tight = made(blocks=14)
    preempted = tight.generate(given, PARAMS)
    assert tight.engine.totals.preempted > 0
    for answer, other in zip(first, preempted, strict=True):
        assert (answer.tokens, answer.logprobs) == (other.tokens, other.logprobs)
