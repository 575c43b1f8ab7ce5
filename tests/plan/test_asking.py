"""The passes by which an engine asks how labels are counted are part of a run's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lezero.plan import StepSpec
from lezero.plan.trace import trace_step
from tests.plan.test_convolutions import large, marked, of_engine

WORDS, ROWS, TOKENS = 3000, 4, 32


class Shifting(nn.Module):
    """A table and a head; its loss shifts labels where `shift`."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.shift = shift
        self.table, self.head = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.table(input_ids))
        if self.shift:
            scores, labels = scores[:, :-1], labels[:, 1:]
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch)


def inputs(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


@marked
@pytest.mark.parametrize("shift", [False, True])
def test_a_run_takes_the_very_blocks_that_are_forecast(shift: bool) -> None:
    spec = StepSpec(batch=ROWS, tokens=TOKENS, loss=loss, inputs=inputs)
    trace = trace_step(lambda: Shifting(shift), spec)
    events = trace.events[trace.bounds[0] : trace.bounds[2]]
    assert large(events) == large(of_engine(Shifting(shift), spec, steps=2))
    scores = ROWS * TOKENS * WORDS * 4
    first, again = (
        large(trace.events[trace.bounds[i] : trace.bounds[i + 1]]).count(scores) for i in (0, 1)
    )
    assert first >= again + 2


def test_a_loss_that_does_not_take_the_question_is_left_alone() -> None:
    def fails(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        assert model.training, "no loss without"
        return loss(model, batch)

    made: list[Any] = []
    for each in (fails, loss):
        spec = StepSpec(batch=ROWS, tokens=TOKENS, loss=each, inputs=inputs)
        trace = trace_step(lambda: Shifting(True), spec)
        made.append(len(trace.steps(2)))
    assert made[0] < made[1]
