"""The attention kernels, one row for each instruction set, the fastest first."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent

NATIVE = Native(
    "attention",
    (
        Kernel(
            "avx512_bf16",
            frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}),
            (_FOLDER / "avx512_bf16_forward.c", _FOLDER / "avx512_bf16_backward.c"),
            ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
        ),
    ),
    registration=_FOLDER / "registration.cpp",
    otherwise="attention stays PyTorch's",
)


def kernel_name() -> str:
    """The kernel that suits this machine's instruction sets, "" if there is none."""
    return NATIVE.kernel_name()


def available() -> bool:
    """True where the kernel runs: builds it (a few seconds, once a machine) and loads it.

    Where it cannot be built, one line of the log says why, and attention stays torch's.
    """
    return NATIVE.available()
