"""Chance without a seed: again the same in Python, never that of a seed, new on every server."""

from __future__ import annotations

from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.models import small
from tests.serve.server.running import serving, small_llm

CHANCE = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)


def test_the_same_calls_have_the_same_answers_but_none_of_a_seed() -> None:
    first, second = (LLM(small(), weights="fp32") for _ in range(2))
    drawn = [
        [llm.generate([[1, 2]], CHANCE)[0].tokens for _ in range(4)] for llm in (first, second)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(map(tuple, drawn[0]))) == 4
    for seed in range(4):
        seeded = CHANCE.model_copy(update={"seed": seed})
        assert first.generate([[1, 2]], seeded)[0].tokens not in drawn[0]


def test_a_server_that_starts_again_does_not_repeat_itself() -> None:
    asked = {"max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    texts: list[str] = []
    for _ in range(2):
        with serving(small_llm()) as client:
            both = client.complete(["abc", "abc"], n=2, **asked).json["choices"]
            texts += [choice["text"] for choice in both]
            seeded = [client.complete("abc", seed=4, **asked).json["choices"][0] for _ in range(2)]
            assert seeded[0]["text"] == seeded[1]["text"]
    assert len(set(texts)) == len(texts) == 8
