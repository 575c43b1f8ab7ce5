"""The kernels of decoder layers, one row for each instruction set, the fastest first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lezero.ops.build import BuildError
from lezero.ops.linear.native import NATIVE as LINEAR
from lezero.ops.native import Kernel, Native

_FOLDER = Path(__file__).parent


def _with_layers(kernel: Kernel) -> Kernel:
    """The layers beside the linear kernel of the same instruction set, which they call."""
    layers = kernel.files[0].stem.partition("_")[0]  # amx, avx512, avx2 or generic
    files = (*kernel.files, _FOLDER / f"{layers}_layers.c")
    trial = _as_linear if kernel.trial else None
    return replace(kernel, files=files, trial=trial)


def _as_linear(ops: Any) -> None:
    """What linear layers must not use here, layers must not either."""
    tried = next(kernel.name for kernel in LINEAR.kernels if kernel.trial)
    if not LINEAR.available() or LINEAR.kernel_name() != tried:
        raise BuildError(f"linear layers did not pass their trial of {tried}")


NATIVE = Native(
    "decoder",
    tuple(_with_layers(kernel) for kernel in LINEAR.kernels),
    registration=_FOLDER / "registration.cpp",
    otherwise="decoder layers run their reference, many times slower",
)
