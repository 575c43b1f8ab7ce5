"""What a loss, a hook or a signal may ask of an engine while a step is under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from lezero.core.errors import OrderError


class StepRequests:
    """Keeps a stop until a step has answered it, and another precision until the step has ended.

    stop: whether a stop is asked for that no step has taken. under_way: whether a step is.
    """

    def __init__(self) -> None:
        self.stop = self.under_way = self._taken = False
        self._precision: str | None = None

    @contextlib.contextmanager
    def step(self, compute_in: Callable[[str], None]) -> Iterator[None]:
        """Around a step, at whose end `compute_in` is called with a precision that was put off. One
        that raises leaves the stop that it has taken to the next."""
        self.refuse_within_step("train_step")
        self.under_way, self._taken = True, False
        try:
            yield
        except BaseException:
            self.stop = self.stop or self._taken
            raise
        finally:
            self.under_way = False
            precision, self._precision = self._precision, None
            if precision is not None:
                compute_in(precision)

    def take_stop(self) -> bool:
        """Whether a stop is asked for, which the step that is under way answers."""
        self._taken, self.stop = self.stop, False
        return self._taken

    def put_off(self, precision: str) -> bool:
        """Whether a step is under way, after which the precision is to change."""
        if self.under_way:
            self._precision = precision
        return self.under_way

    def refuse_within_step(self, what: str) -> None:
        """Raises `OrderError` while a step is under way."""
        if self.under_way:
            raise OrderError(
                f"Engine.{what}: a step is under way, and weights, buffers and optimizer state are "
                f"of different moments within it. Call {what} after train_step has returned, not "
                "from the loss, a hook or a signal handler: set a flag there"
            )
