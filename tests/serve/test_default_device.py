"""Serving where new tensors go elsewhere than the model lies: `torch.set_default_device`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lezero.models import save_hf
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.models import small

PROMPTS = [[1, 2, 3, 5, 8], [13, 21, 34]]
ASKED = [
    SamplingParams(max_tokens=12, temperature=0, logprobs=2),
    SamplingParams(max_tokens=12, temperature=1, seed=3, top_p=0.9, repetition_penalty=1.2),
]


def answers(llm: LLM) -> list[Any]:
    given = [
        (one.tokens, [x.logprob for x in one.logprobs or []])
        for asked in ASKED
        for one in llm.generate(PROMPTS, asked)
    ]
    return [given, [list(map(float, x)) for x in llm.embed(PROMPTS)]]


@pytest.mark.usefixtures("without_accelerator")
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4", "fp32"])
def test_the_default_device_changes_no_answer(tmp_path: Path, weights: Any) -> None:
    save_hf(small(tied=True), tmp_path)
    wanted = answers(LLM(tmp_path, weights=weights))
    with torch.device("meta"):
        assert answers(LLM(tmp_path, weights=weights)) == wanted
