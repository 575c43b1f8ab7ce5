"""Calls that no mode sees."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lezero.core.function_modes import past_modes


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_what_runs_past_modes_is_seen_by_none_and_what_follows_is() -> None:
    @past_modes
    def added(x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        """Adds."""
        return x + times + torch.ones(2)

    with Counting() as mode, torch.device("meta"):
        x = torch.zeros(2, device="cpu")
        before = mode.calls
        assert added(x, times=2).tolist() == [3, 3]
        assert mode.calls == before + 1  # the tolist
        assert torch.zeros(1).is_meta
    assert added.__doc__ == "Adds."
