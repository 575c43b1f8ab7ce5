"""Callbacks: what happens around a step without being part of it.

The trainer calls, on every rank and in the order of its list:

    on_start(trainer)               once, after the model is built and a checkpoint was loaded
    on_step(trainer, result)        after every optimizer step
    on_validation(trainer, loss)    after each validation
    on_checkpoint(trainer, step)    when a generation was handed to the writer
    on_event(trainer, text, level)  something a person should see: a resume, a skipped step, a stop,
                                    a changed config, a file that was not written
    on_end(trainer)                 once, also when training ends with an error

A callback overrides what it needs. It must not communicate between ranks unless it does so on all
of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lezero.train.engine import StepResult
    from lezero.train.trainer import Trainer


class Callback:
    """Base of every callback: does nothing."""

    def on_start(self, trainer: Trainer) -> None: ...

    def on_step(self, trainer: Trainer, result: StepResult) -> None: ...

    def on_validation(self, trainer: Trainer, loss: float) -> None: ...

    def on_checkpoint(self, trainer: Trainer, step: int) -> None: ...

    def on_event(self, trainer: Trainer, text: str, level: str) -> None: ...

    def on_end(self, trainer: Trainer) -> None: ...
