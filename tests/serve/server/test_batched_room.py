"""Modules that take few rows at once, and forecasts that hold nothing."""

from __future__ import annotations

import logging

import pytest
import torch

from lezero.serve.batching.module import InferModule
from lezero.serve.batching.plan import Plan
from lezero.serve.server.batched import BatchServer
from lezero.serve.server.config import ServeConfig
from tests.serve.server.batch_running import Net, serving_batches


class Room(torch.nn.Module):
    """Takes 64 rows at most."""

    def __init__(self) -> None:
        super().__init__()
        self.room = torch.zeros(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.room[: len(x)] = x
        return 2 * self.room[: len(x)]


def served_by(model: InferModule, plan: Plan | None) -> BatchServer:
    """A server that has rehearsed, and is never started."""
    made = BatchServer(model, ServeConfig(port=0, p99_ms=20_000.0), plan=plan)
    made.batches.rehearse()
    return made


@pytest.mark.parametrize(
    ("plan", "most", "warned"),
    [(None, 64, True), (Plan(16), 16, False), (Plan(64), 64, False), (Plan(200), 64, True)],
)
def test_a_module_of_little_room_is_served(plan, most, warned, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    with caplog.at_level("WARNING", "lezero"):
        batcher = served_by(InferModule(Room(), torch.zeros(1, 4)), plan).batches.batcher
    assert any("batches have up to 64" in text for text in caplog.messages) == warned
    assert batcher.most == most
    assert batcher.plan.most <= most
    with serving_batches(InferModule(Room(), torch.zeros(1, 4)), plan) as client:
        rows = torch.arange(800.0).view(200, 4)
        found = client.ask("/v1/infer", {"inputs": {"input": rows.tolist()}})
        assert found.status == 200
        assert found.json["outputs"]["output"] == (2 * rows).tolist()
        assert client.server.batches.runner.counts.failed_steps == 0


@pytest.mark.parametrize(
    ("rate", "said"), [(0.0, "no rate holds"), (0.023, " 0.023 usual"), (1234.5, " 1,234 usual")]
)
def test_a_rate_is_told_with_its_digits(rate: float, said: str) -> None:
    face = served_by(InferModule(Net(), torch.zeros(1, 4)), None).batches
    face.batcher.plan = Plan(1, 1.0, rate=rate)
    assert said in face.metrics.forecast(face.runner)[-1]
