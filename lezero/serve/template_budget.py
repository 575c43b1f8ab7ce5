"""What one rendering of a chat template may take: turns of loops and calls, and room.

A template comes with a model. The sandbox keeps it from touching what is not its own, but not from
running for ever or from filling the memory, which would end the answers of all who ask.

[Note: what is bounded] Loops take their items, and filters what they are given piece by piece,
through `Budget.counted`, and calls, filters, tests and comparisons count as a turn. What would make
text or a list says how much before it does: no step takes long by itself, so that the processor
time of a rendering can be looked at between steps. Lists in lists may hold a list again and again,
so that what a step reads whole is walked through first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lezero.core.errors import ConfigError

TURNS, SECONDS = 1_000_000, 5.0
MOST = 1 << 24
"""Letters of a text, items of a list, or the value of a width or a count."""
BITS = 1 << 14
"""Of an integer: Python writes 4,300 digits at most."""
WALKED, TOGETHER = 1 << 20, 1 << 30
_OTHER = "take another one (chat_template.jinja in the model's folder)"
_TEXT = (str, bytes)


class Budget:
    """Of one rendering."""

    def __init__(self) -> None:
        self._turns, self._room = TURNS, TOGETHER
        self._until = time.thread_time() + SECONDS

    def turn(self) -> None:
        """Raises `ConfigError` where the template has had its turns or its time."""
        self._turns -= 1
        if self._turns < 0:
            raise self._endless(f"{TURNS:,} turns and calls")
        if not self._turns & 15 and time.thread_time() > self._until:
            raise self._endless(f"{SECONDS:.0f} s")

    def step(self, size: int) -> None:
        """A turn that makes text of so many letters."""
        self._turns -= 1
        self._room -= size
        if size > MOST or self._room < 0 or self._turns < 0 or not self._turns & 15:
            self._turns += 1
            self.turn()
            self.need(0 if size <= MOST else size)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.turn()
            yield item

    def need(self, size: int) -> None:
        """Raises `MemoryError` for text or a list that is too large, before it is made."""
        self._room -= size
        if size > MOST or self._room < 0:
            raise MemoryError(
                f"MemoryError: a step makes or reads too much (at most {MOST:,} letters or items, "
                f"slow filters less, and widths as much); {_OTHER}"
            )

    def made(self, value: Any) -> Any:
        """`value`, which a step made: an integer that is too long would make the next ones slow."""
        if isinstance(value, int):
            self.need(MOST + 1 if value.bit_length() > BITS else 0)
        elif isinstance(value, _TEXT):
            self.need(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.need(len(value))
            self._room -= 8 * len(value)
        return value

    def width(self, value: Any) -> None:
        """Raises `MemoryError` for what is a width or a count, and too large."""
        if isinstance(value, int) and not -MOST <= value <= MOST:
            self.need(MOST + 1)

    def walked(self, value: Any) -> int:
        """How much text `value` is at least, with all that it holds."""
        if isinstance(value, _TEXT):
            return len(value)
        if not isinstance(value, (list, tuple, dict)):
            return 24
        found, items, left = 0, [value], WALKED
        while items:
            item = items.pop()
            if isinstance(item, dict):
                items += item.keys()
                items += item.values()
            elif isinstance(item, (list, tuple)):
                items += item
            found += len(item) if isinstance(item, _TEXT) else 24
            left -= 1
            if len(items) > left:
                raise MemoryError(f"MemoryError: lists of more than {WALKED:,} items; {_OTHER}")
        return found

    def gathered(self, pieces: Iterable[str]) -> str:
        """The text that a template writes, as long as it is not too long."""
        found, size = list[str](), 0
        for piece in pieces:
            found.append(piece)
            size += len(piece)
            if size > MOST:
                self.need(size)
        return "".join(found)

    def _endless(self, what: str) -> ConfigError:
        return ConfigError(
            f"messages: the model's chat template does not end within {what}; {_OTHER}"
        )


_NOW: ContextVar[Budget] = ContextVar("budget")


def budget() -> Budget:
    """Of the rendering that runs."""
    return _NOW.get()


@contextmanager
def one_rendering() -> Iterator[Budget]:
    token = _NOW.set(made := Budget())
    try:
        yield made
    finally:
        _NOW.reset(token)
