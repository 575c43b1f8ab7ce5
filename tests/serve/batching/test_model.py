"""How many items a step may have is measured at the start."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.serve.batching.model import measured
from lezero.serve.batching.module import InferModule


class Room(nn.Module):
    """Takes no more rows than it has room for, and may break for good when given more."""

    def __init__(self, room: int, breaks: bool = False) -> None:
        super().__init__()
        self.room, self.breaks, self.broken, self.most = room, breaks, False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, len(x))
        self.broken |= self.breaks and len(x) > self.room
        if self.broken or len(x) > self.room:
            raise RuntimeError(f"no room for {len(x)} rows")
        return x * 2


def test_a_module_with_little_room_gets_batches_that_fit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    for room, failed in ((64, 65), (70, 80), (1 << 20, 0)):
        caplog.clear()
        with caplog.at_level("WARNING", "lezero"):
            _, most = measured(InferModule(Room(room), torch.zeros(1, 4)), 10.0)
        told = f"steps of {failed} rows fail (RuntimeError: no room for {failed} rows)"
        ran = {64: 64, 70: 65}.get(room, 256)
        assert most == ran
        assert caplog.messages == ([f"{told}: batches have up to {ran}"] if failed else [])
    broken = InferModule(Room(64, breaks=True), torch.zeros(1, 4))
    with pytest.raises(ConfigError, match=r"a step of 65 rows fails.*--batch 64 or fewer"):
        measured(broken, 10.0)
    with pytest.raises(ConfigError, match=r"fails on a step of 1 .*no room for 1 rows"):
        measured(broken, 10.0)


def test_no_larger_steps_are_measured_than_are_asked_for() -> None:
    room = Room(100)
    model = InferModule(room, torch.zeros(1, 4))
    for most in (1, 10, 64):
        room.most = 0
        assert measured(model, 10.0, most=most)[1] == room.most == most
