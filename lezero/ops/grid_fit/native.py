"""The kernels of `grid_fit`: one source, built for each instruction set."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Native, each_width

_FOLDER = Path(__file__).parent
# A product and the sum around it stay two roundings, as in the reference.
_EXACT = ("-ffp-contract=off", "-Wno-psabi")

NATIVE = Native(
    "grid_fit",
    each_width((_FOLDER / "fit.c",), flags=_EXACT),
    registration=_FOLDER / "registration.cpp",
    otherwise="4-bit weights are fitted in PyTorch, several times slower",
)
