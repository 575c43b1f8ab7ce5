"""The C kernels of AdamW: one source, compiled for each instruction set."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent
_FILES = (_FOLDER / "kernel.c",)
_EXACT = ("-ffp-contract=off",)  # only the fusions that the formula names

NATIVE = Native(
    "adamw",
    [
        Kernel(
            "avx512",
            frozenset({"avx512f", "avx512bw", "avx512vl", "fma"}),
            _FILES,
            ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512cd", "-mfma", *_EXACT),
        ),
        Kernel("avx2", frozenset({"avx2", "fma"}), _FILES, ("-mavx2", "-mfma", *_EXACT)),
        Kernel("generic", frozenset(), _FILES, _EXACT),
    ],
    registration=_FOLDER / "registration.cpp",
    otherwise="AdamW with masters and AdamW8bit run in plain PyTorch, several times slower",
)
