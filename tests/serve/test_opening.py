"""What weights a model that is quantized already runs in, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lezero.compress.quantize import Int8Weight, quantize_
from lezero.core.errors import ConfigError
from lezero.models import Transformer
from lezero.ops.decoder import native
from lezero.serve.llm import LLM
from lezero.serve.opening import program_of
from lezero.serve.plain import PlainProgram
from lezero.serve.sampling import SamplingParams
from tests.serve.models import small

GREEDY = SamplingParams(max_tokens=8, temperature=0)


def quantized() -> Transformer:
    model: Any = quantize_(small(), Int8Weight(), objective="size")
    return model  # type: ignore[no-any-return]


def test_bf16_turns_codes_back() -> None:
    kept, wide = program_of(quantized(), "auto"), program_of(quantized(), "bf16")
    if native.NATIVE.available():
        assert "int8 weights" in kept.description
    assert "bf16 weights" in wide.description or "bfloat16 weights" in wide.description
    assert wide.read_bytes > 1.5 * kept.read_bytes
    assert len(LLM(quantized(), weights="bf16").generate([1, 2, 3], GREEDY)[0].tokens) == 8


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_codes_are_not_quantized_again(weights: Any) -> None:
    with pytest.raises(ConfigError, match=f"weights: got '{weights}', but .* quantized already"):
        program_of(quantized(), weights)


def test_the_plain_program_says_that_weights_are_quantized() -> None:
    assert PlainProgram(quantized()).description == (
        "plain torch, quantized weights, float32 keys and values"
    )
    assert PlainProgram(small().to(torch.bfloat16)).description == (
        "plain torch, bfloat16 weights, keys and values"
    )


def test_layers_that_groups_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match=r"weights: got 'int4'.*\(60, 64, 96\); take 'int8'"):
        program_of(small(dim=60, head_dim=16), "int4")
