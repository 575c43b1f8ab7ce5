"""The kernels of `packed_attention`, one row for each instruction set, the fastest first."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent

NATIVE = Native(
    "packed_attention",
    (
        Kernel(
            "avx512",
            frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "fma", "f16c"}),
            (_FOLDER / "avx512.c",),
            (
                "-mavx512f",
                "-mavx512bw",
                "-mavx512vl",
                "-mavx512dq",
                "-mavx512vnni",
                "-mfma",
                "-mf16c",
            ),
        ),
        Kernel(
            "avx2",
            frozenset({"avx2", "fma", "f16c"}),
            (_FOLDER / "avx2.c",),
            ("-mavx2", "-mfma", "-mf16c"),
        ),
    ),
    registration=_FOLDER / "registration.cpp",
    otherwise="attention of encoders is PyTorch's, over padded texts",
)
