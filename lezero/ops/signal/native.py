"""The library of the words: atomics and the kernel's futex, the same for every processor."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent

NATIVE = Native(
    "signal",
    (Kernel("generic", frozenset(), (_FOLDER / "words.c",)),),
    registration=_FOLDER / "registration.cpp",
    otherwise="ranks of one host exchange through Gloo, not through shared memory",
)
