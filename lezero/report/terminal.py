"""What rich lays out, written to a terminal or elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console


class _Unpadded:
    """A text file that drops the blanks at the ends of lines."""

    def __init__(self, file: IO[str]) -> None:
        self._to = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._to, name)

    def write(self, text: str) -> int:
        *lines, rest = text.split("\n")
        self._to.write("\n".join([*(line.rstrip(" ") for line in lines), rest]))
        return len(text)


@contextlib.contextmanager
def unpadded(console: Console) -> Iterator[None]:
    """What is printed inside ends no line with blanks, unless it goes to a terminal, where nobody
    sees them and colours would stand behind them, or is captured or recorded."""
    if console.is_terminal:
        yield
        return
    own = console._file  # None follows sys.stdout, and shall again
    console.file = cast("IO[str]", _Unpadded(console.file))
    try:
        yield
    finally:
        console._file = own
