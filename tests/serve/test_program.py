"""What every program promises of a model: how far its sequences reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from lezero.core.errors import ConfigError
from lezero.models import Transformer, generate, load_hf, save_hf
from lezero.serve.captured import CapturedProgram
from lezero.serve.draft import DraftModel
from lezero.serve.llm import LLM
from lezero.serve.opening import program_of
from lezero.serve.program import Fed
from lezero.serve.sampling import SamplingParams
from tests.models.test_rope import longrope as longrope_scaling
from tests.serve.models import prompts, small

Made = Callable[[], Transformer]
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=0)


def dynamic() -> Transformer:
    """Of 64 tokens, up to 128 where no keys are kept."""
    return small(context=64, rope_scaling={"kind": "dynamic", "factor": 2.0})


def longrope() -> Transformer:
    """The same, with angles that change once."""
    return small(context=128, rope_scaling=longrope_scaling(8, factor=2.0, original_context=64))


turning = pytest.mark.parametrize("made", [dynamic, longrope])
"""Models whose angles depend on the length of the sequence beyond 64 tokens."""


@turning
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_sequences_end_where_all_angles_change(made: Made, weights: str) -> None:
    llm = LLM(made(), weights=weights)
    assert llm.context == llm.program.longest == 64
    assert "beyond 64 tokens" in llm.program.description
    with pytest.raises(ConfigError, match=r"together 65, allowed is 64 .* beyond 64 tokens"):
        llm.generate([[5] * 41], PARAMS)
    with pytest.raises(ConfigError, match="context: got 100, allowed is 1 to the model's 64"):
        LLM(made(), weights=weights, context=100)
    assert LLM(small(), weights=weights).context == 512


def test_linear_scaling_that_may_reach_further_names_the_way() -> None:
    model = small(context=64, rope_scaling={"kind": "linear", "factor": 2.0})
    with pytest.raises(ConfigError, match=r"model's 64 .*factor of 2.*raise max_position_embedd"):
        LLM(model, context=128)


@turning
def test_up_to_there_tokens_are_those_of_plain_generation(made: Made) -> None:
    given = [*prompts(7), [5] * 40]
    expected = generate(made(), given, 24)
    found = LLM(made(), weights="fp32").generate(given, PARAMS)
    assert [answer.tokens for answer in found] == expected
    together = LLM(made(), weights="bf16").generate(given, PARAMS)
    for prompt, answer in zip(given, together, strict=True):
        (alone,) = LLM(made(), weights="bf16").generate([prompt], PARAMS)
        assert (alone.tokens, alone.logprobs) == (answer.tokens, answer.logprobs)


@turning
def test_a_model_that_went_beyond_serves_as_before(made: Made) -> None:
    model = made()
    generate(model, [5] * 60, 8)  # its tables of angles are those of a longer sequence now
    given = [*prompts(7), [5] * 40]
    found = LLM(model, weights="fp32").generate(given, PARAMS)
    assert [answer.tokens for answer in found] == generate(made(), given, 24)


@turning
def test_graphs_of_a_device_are_not_for_angles_that_change(made: Made) -> None:
    on_a_device = SimpleNamespace(type="cuda")
    for model, suits in ((made(), False), (small(), True)):
        weight = SimpleNamespace(device=on_a_device)
        stand_in = SimpleNamespace(config=model.config, norm=SimpleNamespace(weight=weight))
        assert CapturedProgram.suits(cast(Transformer, stand_in)) is suits


def test_a_longrope_folder_of_transformers_is_served_by_kernels(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_hf(longrope(), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    program = program_of(load_hf(tmp_path), "fp32")
    assert not program.slow
    program.reserve(8)
    tokens = torch.randint(97, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    found = torch.cat(
        [
            program.run([Fed(tokens[:50], 0, range(4), range(50))]),
            program.run([Fed(tokens[50:], 50, range(4), range(14))]),
        ]
    )
    with torch.no_grad():
        wanted = theirs(torch.tensor([tokens])).logits[0]
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-5


@turning
def test_a_draft_whose_angles_change_guesses_up_to_there(made: Made) -> None:
    assert program_of(made(), "bf16").longest == 64
    given, params = prompts(4), SamplingParams(temperature=0, max_tokens=60)
    llm = LLM(small(), weights="bf16", speculate="draft", draft=made())
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
