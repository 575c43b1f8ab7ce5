"""What every program promises of a model: how far its sequences reach."""

from __future__ import annotations

import pytest

from lezero.core.errors import ConfigError
from lezero.models import Transformer, generate
from lezero.serve.draft import DraftModel
from lezero.serve.llm import LLM
from lezero.serve.opening import program_of
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts, small

PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=0)


def dynamic() -> Transformer:
    """Of 64 tokens, up to 128 where no keys are kept."""
    return small(context=64, rope_scaling={"kind": "dynamic", "factor": 2.0})


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_dynamic_scaling_ends_at_the_context(weights) -> None:
    llm = LLM(dynamic(), weights=weights)
    assert llm.context == llm.program.longest == 64
    assert "beyond 64 tokens" in llm.program.description
    with pytest.raises(ConfigError, match=r"together 65, allowed is 64 .* beyond 64 tokens"):
        llm.generate([[5] * 41], PARAMS)
    with pytest.raises(ConfigError, match="context: got 100, allowed is 1 to the model's 64"):
        LLM(dynamic(), weights=weights, context=100)
    assert LLM(small(), weights=weights).context == 512


def test_dynamic_scaling_up_to_the_context() -> None:
    given = [*prompts(7), [5] * 40]
    expected = generate(dynamic(), given, 24)
    found = LLM(dynamic(), weights="fp32").generate(given, PARAMS)
    assert [answer.tokens for answer in found] == expected
    together = LLM(dynamic(), weights="bf16").generate(given, PARAMS)
    for prompt, answer in zip(given, together, strict=True):
        (alone,) = LLM(dynamic(), weights="bf16").generate([prompt], PARAMS)
        assert (alone.tokens, alone.logprobs) == (answer.tokens, answer.logprobs)


def test_a_draft_with_dynamic_scaling_guesses_up_to_its_context() -> None:
    assert program_of(dynamic(), "bf16").longest == 64
    given, params = prompts(4), SamplingParams(temperature=0, max_tokens=60)
    llm = LLM(small(), weights="bf16", speculate="draft", draft=dynamic())
    guesser = llm.engine._speculator.inner  # type: ignore[union-attr]
    assert isinstance(guesser, DraftModel)
    llm.engine._speculator = guesser  # without a look at the clock
    run, reach = guesser.program.run, list[int]()

    def seen(fed):
        reach.extend(one.position + len(one.tokens) for one in fed)
        return run(fed)

    guesser.program.run = seen  # type: ignore[method-assign]
    found = llm.generate(given, params)
    assert 50 < max(reach) <= 64
    plain = LLM(small(), weights="bf16").generate(given, params)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]
