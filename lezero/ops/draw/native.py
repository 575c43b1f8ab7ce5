"""The kernels of `draw_tokens` and its like: one source, built for each instruction set."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent
_FILES = (_FOLDER / "draw.c",)
_QUIET = ("-Wno-psabi",)  # of vectors wider than a processor's

NATIVE = Native(
    "draw",
    (
        Kernel(
            "avx512",
            frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}),
            _FILES,
            (
                *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", *_QUIET),
                "-mprefer-vector-width=512",
            ),
        ),
        Kernel("avx2", frozenset({"avx2", "fma"}), _FILES, ("-mavx2", "-mfma", *_QUIET)),
        Kernel("generic", frozenset(), _FILES, _QUIET),
    ),
    registration=_FOLDER / "registration.cpp",
    otherwise="tokens are drawn in PyTorch, several times slower",
)
