"""The kernels of `ordered_sum`: one source, built for each instruction set."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent
_FILES = (_FOLDER / "sum.c",)

NATIVE = Native(
    "ordered_sum",
    (
        Kernel(
            "avx512",
            frozenset({"avx512f", "avx512bw", "avx512vl"}),
            _FILES,
            ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
        ),
        Kernel("avx2", frozenset({"avx2"}), _FILES, ("-mavx2",)),
        Kernel("generic", frozenset(), _FILES),
    ),
    registration=_FOLDER / "registration.cpp",
    otherwise="sums over ranks run in PyTorch",
)
