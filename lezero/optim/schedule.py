"""Learning-rate schedules: pure functions of the step, so that a resume needs no hidden state."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from lezero.core.config import Config


class Schedule(Config):
    """The factor on the learning rate at each step: warm-up, then a curve down to `final`.

    cosine: Loshchilov & Hutter, "SGDR" (2017), eq. 5 without restarts. wsd (warmup-stable-decay):
    Hu et al., "MiniCPM" (2024), section 4: constant, then linear down over the last `decay` share.
    """

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup: int = Field(0, ge=0)
    """Steps of linear warm-up from 1/warmup to 1."""
    final: float = Field(0.1, ge=0, le=1)
    """Factor at the last step (not used by `constant`)."""
    decay: float = Field(0.2, gt=0, le=1)
    """wsd only: share of all steps that the final decay takes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        default = type(self).model_fields["decay"].default
        if self.decay != default and self.kind != "wsd":
            raise ValueError(f"decay belongs to kind 'wsd'; this schedule is '{self.kind}'")
        return self

    def factor(self, step: int, total: int) -> float:
        """Factor at `step` (0-based) of `total` steps; the value at `total - 1` is `final`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        begin = self.warmup
        if self.kind == "wsd":
            begin = max(begin, total - max(1, round(self.decay * total)))
            if step < begin:
                return 1.0
        along = min(1.0, (step - begin + 1) / max(1, total - begin))
        if self.kind == "cosine":
            return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * along))
        return 1 - (1 - self.final) * along
