"""A module that saves another number since its second version, as torch's own observers do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Scaled(nn.Module):
    """Before version 2 half of `factor` was saved. older: an older state is an error."""

    _version = 2

    def __init__(self, factor: float = 3.0, older: bool = True) -> None:
        super().__init__()
        self.older = older
        self.factor = nn.Parameter(torch.full((1,), factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *rest: Any) -> None:
        if (about.get("version") or 1) < 2:
            if not self.older:
                raise ValueError("scaled: its state is too old")
            state[f"{prefix}factor"] = 2 * state[f"{prefix}factor"]
        super()._load_from_state_dict(state, prefix, about, *rest)
