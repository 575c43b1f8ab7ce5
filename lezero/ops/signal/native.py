"""The library of the words: atomics and Linux's futex, the same for every processor."""

from __future__ import annotations

import sys
from pathlib import Path

from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent

NATIVE = Native(
    "signal",
    (Kernel("generic", frozenset(), (_FOLDER / "words.c",)),) if sys.platform == "linux" else (),
    registration=_FOLDER / "registration.cpp",
    otherwise="ranks of one host exchange through Gloo, not through shared memory",
)
