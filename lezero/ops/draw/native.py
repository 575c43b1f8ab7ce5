"""The kernels of `draw_tokens` and its like: one source, built for each instruction set."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Native, each_width

_FOLDER = Path(__file__).parent

NATIVE = Native(
    "draw",
    each_width((_FOLDER / "draw.c",), also=("fma",), flags=("-Wno-psabi",)),
    registration=_FOLDER / "registration.cpp",
    otherwise="tokens are drawn in PyTorch, several times slower",
)
