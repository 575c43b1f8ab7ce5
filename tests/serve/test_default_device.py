"""Serving where new tensors go elsewhere than the model lies: `torch.set_default_device`."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lezero.models import save_hf
from lezero.serve.batching.batcher import Batcher
from lezero.serve.batching.curve import Curve
from lezero.serve.batching.module import InferModule
from lezero.serve.batching.plan import Plan
from lezero.serve.batching.runner import Runner
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


class Places(nn.Module):
    """Whether new tensors lie on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((len(x), 1), torch.arange(len(x)).is_meta, device=x.device)


def test_a_module_sees_its_default_device_while_it_is_served() -> None:
    told = queue.Queue[Any]()
    with torch.device("meta"):
        model = InferModule(Places(), torch.zeros(1, 4, device="cpu"))
        runner = Runner(model, Batcher(Curve([(1, 0.001)]), target_s=60.0, plan=Plan(1)))
        runner.start()
    try:
        runner.submit([{"input": torch.zeros(4)}], told.put)
        (answer,) = told.get(timeout=20)
        assert answer["output"].tolist() == [True]
    finally:
        runner.stop()
