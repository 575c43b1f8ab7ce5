"""The kernels of linear layers, one row for each instruction set, the fastest first."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.linear import amx
from lezero.ops.native import Kernel, Native
from lezero.profiler.products import product_seconds

_FOLDER = Path(__file__).parent
# A product and the sum around it stay two roundings where the reference has two.
_ROUNDED = ("-ffp-contract=off",)
_EXACT = (*_ROUNDED, "-mfma", "-mf16c")
_VNNI = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_HAS_VNNI = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "fma", "f16c"})
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AMX = ("-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mprfchw")


def _slow_bf16() -> bool:
    """Intel's AVX512-BF16 multiplies half as fast as fp32: weights are then widened to that."""
    seconds = product_seconds()
    return seconds["bf16"] > seconds["fp32"]


NATIVE = Native(
    "linear",
    (
        Kernel(
            "amx",
            _HAS_VNNI | {"avx512_bf16"} | amx.INSTRUCTIONS,
            (_FOLDER / "amx.c",),
            (*_EXACT, *_VNNI, "-mavx512bf16", *_AMX),
            amx.try_out,
        ),
        Kernel(
            "avx512_bf16",
            _HAS_VNNI | {"avx512_bf16"},
            (_FOLDER / "avx512_vnni.c",),
            (*_EXACT, *_VNNI, "-mavx512bf16"),
            slow=_slow_bf16,
        ),
        Kernel("avx512_vnni", _HAS_VNNI, (_FOLDER / "avx512_vnni.c",), (*_EXACT, *_VNNI)),
        Kernel(
            "avx_vnni",
            _HAS_AVX2 | {"avx_vnni"},
            (_FOLDER / "avx2.c",),
            (*_EXACT, "-mavx2", "-mavxvnni"),
        ),
        Kernel(
            "avx2",
            _HAS_AVX2,
            (_FOLDER / "avx2.c",),
            (*_EXACT, "-mavx2"),
        ),
        Kernel(
            "dotprod",
            frozenset({"neon", "dotprod"}),
            (_FOLDER / "generic.c",),
            (*_ROUNDED, "-march=armv8.2-a+dotprod"),
        ),
        Kernel("generic", frozenset(), (_FOLDER / "generic.c",), _ROUNDED),
    ),
    registration=_FOLDER / "registration.cpp",
    otherwise="packed linear layers run their reference, many times slower",
)


def kernel_name() -> str:
    """The kernel that suits this machine's instruction sets, "" if there is none."""
    return NATIVE.kernel_name()


def available() -> bool:
    """True where a kernel runs: builds it (a few seconds, once a machine) and loads it.

    Where none can be built, one line of the log says why, and the reference runs.
    """
    return NATIVE.available()
