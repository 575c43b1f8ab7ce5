"""Stop strings and guesses: what came behind the stop string is no part of the answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lezero.data.tokenizer import bytes_tokenizer
from lezero.serve.answer import Answer
from lezero.serve.blocks import BlockPool
from lezero.serve.coder import Coder
from lezero.serve.llm import LLM
from lezero.serve.request import Request
from lezero.serve.sampling import Drawn, SamplingParams
from lezero.serve.scheduler import Scheduler
from lezero.serve.speculate import Speculator
from tests.serve.models import says, small
from tests.serve.server.running import serving, small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=60, logprobs=0, ignore_eos=True)
PROMPT = "abc" * 20


class _Knowing(Speculator):
    """Guesses what is right."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def guess(self, requests: Sequence[Request]) -> None:
        for request in requests:
            done = len(request.answer)
            request.drafts = self._tokens[done : done + 5]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return small_llm()


def test_guesses_do_not_change_where_a_stop_string_ends_the_answer(plain) -> None:
    guessing = small_llm(speculate="lookup")
    whole = plain.generate(PROMPT, GREEDY)[0]
    guessing.engine._speculator = _Knowing(whole.tokens)
    text = whole.text
    for start in range(2, 50, 4):
        params = GREEDY.model_copy(update={"stop": (text[start : start + 3],)})
        right, found = (llm.generate(PROMPT, params)[0] for llm in (plain, guessing))
        assert right.reason == "stop"
        assert (found.text, found.reason) == (right.text, right.reason)
        assert (found.tokens, found.logprobs) == (right.tokens, right.logprobs)
        pieces = list(guessing.stream(PROMPT, params))
        assert [token for piece in pieces for token in piece.tokens] == right.tokens
    assert guessing.engine.totals.accepted > 50
    guessing.engine.scheduler.check()


def test_a_stop_string_in_the_last_token_counts(plain) -> None:
    text = plain.generate(PROMPT, GREEDY)[0].text
    ends = GREEDY.model_copy(update={"max_tokens": 10, "stop": (text[7:10],)})
    found = plain.generate(PROMPT, ends)[0]
    assert found.reason == "stop"
    assert text.startswith(found.text)


class _Halves:
    """Each token is a space and the beginning of a character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return (b" \xe2" * len(tokens)).decode(errors="replace")


def test_a_stop_string_before_half_a_character_counts() -> None:
    llm = LLM(small(vocab=257), weights="bf16", coder=Coder(_Halves(), frozenset()))
    params = SamplingParams(max_tokens=3)
    whole = llm.generate([1, 2], params)[0]
    assert (whole.text, whole.reason) == (" \ufffd" * 3, "length")
    stops = params.model_copy(update={"stop": (" ",)})
    found = llm.generate([1, 2], stops)[0]
    assert (found.text, found.reason) == ("", "stop")
    assert list(llm.stream([1, 2], stops))[-1].reason == "stop"
    with serving(llm) as client:
        (choice,) = client.complete([1, 2], max_tokens=3, stop=" ").json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(
    ("tokenizer", "stop", "text"), [(bytes_tokenizer(), "b", "a"), (_Halves(), " ", "")]
)
def test_a_stop_string_before_an_error_counts(tokenizer, stop: str, text: str) -> None:
    """Of the step that drew it, as a later row of the step had no token."""
    scheduler = Scheduler(BlockPool(20, 4), 16, 4, 64)
    request = Request("a", [7] * 5, SamplingParams(max_tokens=9, stop=(stop,)))
    answer = Answer(request, Coder(tokenizer, frozenset()))
    scheduler.add(request)
    scheduler.update(scheduler.schedule(), [[Drawn(ord("a"))]])
    answer.take(request.answer, scheduler)
    request.drafts = (ord("b"),)
    scheduler.update(scheduler.schedule(), [[Drawn(ord("b")), Drawn(-1, error="NaN")]])
    answer.take(request.answer[1:], scheduler)
    found = answer.completion()
    assert (found.text, found.reason, found.error) == (text, "stop", None)


def test_a_stop_string_that_is_a_special_token_ends_the_answer_at_it() -> None:
    """It leaves nothing in the text, where stop strings are looked for."""
    tokenizer = bytes_tokenizer()
    llm = LLM(small(vocab=257), weights="bf16", coder=Coder(tokenizer, frozenset()))
    says(llm.program, 1, tokenizer.encode("ok<|endoftext|>ok"))
    plain = {"temperature": 0, "max_tokens": 10}

    def answer(*stop: str) -> tuple[str, str | None, int]:
        found = llm.generate("a", SamplingParams(stop=stop, **plain))[0]
        return found.text, found.reason, len(found.tokens)

    assert answer("zz") == ("ok" * 4, "length", 10)
    assert answer("zz", "<|endoftext|>") == ("ok", "stop", 3)
    assert answer("kok") == ("o", "stop", 5), "a special token leaves nothing between"
    params = SamplingParams(stop=("<|endoftext|>",), stop_token_ids=(256, 7), **plain)
    assert llm.request("a", params).params is params
    with serving(llm) as client:
        asked = {"temperature": 0, "max_tokens": 10, "logprobs": 1}
        for end in ({"stop": "<|endoftext|>"}, {"stop_token_ids": [256]}):
            (choice,) = client.complete("a", **asked, **end).json["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("ok", "stop")
            assert choice["logprobs"]["tokens"] == ["o", "k"], "it has none of its own"
