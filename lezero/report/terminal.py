"""What rich lays out, written to a terminal or elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def unpadded(console: Console) -> Iterator[None]:
    """What is printed inside ends no line with blanks, unless it goes to a terminal, where nobody
    sees them and colours would stand behind them."""
    if console.is_terminal:
        yield
        return
    with console.capture() as captured:
        yield
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")
    console.file.flush()
