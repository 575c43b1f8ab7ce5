"""The kernels of `grid_fit`: one source, built for each instruction set."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent
_FILES = (_FOLDER / "fit.c",)
# A product and the sum around it stay two roundings, as in the reference.
_EXACT = ("-ffp-contract=off", "-Wno-psabi")
_WIDE = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")

NATIVE = Native(
    "grid_fit",
    (
        Kernel(
            "avx512",
            frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c"}),
            _FILES,
            (*_EXACT, *_WIDE, "-mf16c"),
        ),
        Kernel("avx2", frozenset({"avx2", "f16c"}), _FILES, (*_EXACT, "-mavx2", "-mf16c")),
        Kernel("generic", frozenset(), _FILES, _EXACT),
    ),
    registration=_FOLDER / "registration.cpp",
    otherwise="4-bit weights are fitted in PyTorch, several times slower",
)
