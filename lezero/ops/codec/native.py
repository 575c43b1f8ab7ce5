"""The codec kernels, one row for each instruction set, the fastest first."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent
# A product and the sum around it stay two roundings, so that every kernel gives the same bytes.
_EXACT = ("-ffp-contract=off",)
_AVX512 = ("avx512f", "avx512bw", "avx512vl")  # with these every processor has DQ too

NATIVE = Native(
    "codec",
    (
        Kernel(
            "avx512",
            frozenset(_AVX512),
            (_FOLDER / "avx512.c",),
            (*_EXACT, *(f"-m{name}" for name in (*_AVX512, "avx512dq"))),
        ),
        Kernel("avx2", frozenset({"avx2"}), (_FOLDER / "avx2.c",), (*_EXACT, "-mavx2")),
        Kernel("generic", frozenset(), (_FOLDER / "generic.c",), _EXACT),
    ),
    registration=_FOLDER / "registration.cpp",
    otherwise="codecs run PyTorch's operations, many times slower",
)
