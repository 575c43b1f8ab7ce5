"""What `Engine.train_step` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `loss` is the mean over all counted units of all ranks, in nats for the
    built-in loss; `tokens` the number of those units; `skipped` says why no update was made."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    skipped: str | None = None
    stop: bool = False

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0
