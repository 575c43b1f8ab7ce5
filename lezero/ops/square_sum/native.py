"""The kernels of `square_sums`: one source, built for each instruction set."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Native, each_width

_FOLDER = Path(__file__).parent

NATIVE = Native(
    "square_sum",
    each_width((_FOLDER / "sum.c",)),
    registration=_FOLDER / "registration.cpp",
    otherwise="norms of gradients are computed in PyTorch",
)
