"""The extension point of models that answer in one pass, and how their steps are measured.

A member says how much work an item is, which items may run together, and runs some of them. All
of it but `run` is called from any thread; `run` from one thread alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from lezero.core.errors import ConfigError
from lezero.core.log import logger
from lezero.serve.batching.curve import Curve

COUNTS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 24, 25, 28, 32, 33, 40, 48, 49, 64, 65, 80, 96),
    *(128, 192, 256),
)
"""Items of the steps to measure; kernels begin another tile just past multiples of 8, if at all."""
_REPEATS = 3
_LOG = logger("serve")


class BatchedModel(ABC):
    """A model behind a batcher. description: one line for people."""

    description: str
    usual: Sequence[float] = (1.0,)
    """Work of usual requests, for the first plan; real ones take their place."""
    on_cpu: bool = True
    """Whether it runs on a CPU alone: an error on an accelerator may end all that follows."""
    is_users: bool = False
    """Whether what it runs is a user's own, which may not take as many items as a step may have."""

    @abstractmethod
    def run(self, items: Sequence[Any]) -> Sequence[Any]:
        """The answer to each item. All are of one kind. What it raises ends these items; they run
        again one by one, so that one that fails harms no other."""

    @abstractmethod
    def samples(self) -> Iterator[list[Any]]:
        """Steps to measure before the start, of rising work."""

    @abstractmethod
    def is_sound(self, answer: Any) -> bool:
        """Whether an answer holds no NaN."""

    def unlike(self, alone: Any, answers: Sequence[Any]) -> str:
        """What differs between the answers to a step of samples and that to one sample `alone`, or
        nothing; for a user's own model, of which one sample is as the other."""
        return ""

    def work(self, item: Any) -> float:
        """How much work an item is; the works of the items of a step add up."""
        return 1.0

    def kind(self, item: Any) -> Hashable:
        """Items of equal kinds may run together."""
        return None


def measured(
    model: BatchedModel, target_s: float, seconds: float = 10.0, most: int = COUNTS[-1]
) -> tuple[Curve, int]:
    """Runs the samples of `model`, up to `most` items, steps that take longer than the target, and
    `seconds` in all at most. This also builds kernels and touches memory before the first client is
    let in. Returns the curve, and how many items a step may have: `most`, or as many as the last
    step that ran where a user's module fails on a larger one.

    Raises `ConfigError` where such a module fails on a single item, or answers an item otherwise
    beside many than alone.
    """
    alone: Sequence[Any] = ()
    found: list[tuple[float, float]] = []
    end, ran = time.perf_counter() + seconds, 0
    for sample in model.samples():
        items = sample[:most]
        work = sum(model.work(item) for item in items)
        try:
            answers = model.run(items)
            took = [_timed(model, items) for _ in range(_REPEATS)]
        except Exception as error:
            if not model.is_users:
                raise
            _check_failure(model, len(items), ran, error)
            return Curve(found), ran
        alone = alone or answers
        if unlike := model.unlike(alone[0], answers):
            raise ConfigError(
                f"{unlike}: a step of {len(items)} equal rows shows it, of {ran} none; give "
                f"--batch {ran}, or rows that do not see each other"
            )
        found += [(work, x) for x in took]
        ran = len(items)
        if ran >= most or min(took) > target_s or time.perf_counter() > end:
            break
    return Curve(found), most


def _check_failure(model: BatchedModel, count: int, ran: int, error: Exception) -> None:
    """Warns of a step that failed where smaller ones ran; `ConfigError` where none does."""
    problem = f"{type(error).__name__}: {error}"
    if not ran:
        raise ConfigError(f"module: fails on a step of {count} ({problem})") from error
    try:  # an accelerator may have stopped for good
        model.run(next(model.samples()))
    except Exception as after:
        raise ConfigError(
            f"module: a step of {count} rows fails ({problem}), and then one of 1 does too; give "
            f"--batch {ran} or fewer"
        ) from after
    text = "steps of %d rows fail (%s): batches have up to %d"
    _LOG.warning(text, count, problem, ran)


def _timed(model: BatchedModel, items: Sequence[Any]) -> float:
    began = time.perf_counter()
    model.run(items)
    return time.perf_counter() - began
