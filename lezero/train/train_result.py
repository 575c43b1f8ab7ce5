"""How a run of the trainer ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. `exit_status` is 0, or 128 + the signal that asked it to stop.

    The losses are the last ones, of an earlier start where this one had none; None where there are
    none, or they were not finite.
    """

    run: Path
    step: int
    loss: float | None
    validation_loss: float | None
    exit_status: int
