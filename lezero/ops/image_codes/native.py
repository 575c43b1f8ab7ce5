"""The kernels of `image_codes`: one source, built for each instruction set."""

from __future__ import annotations

from pathlib import Path

from lezero.ops.native import Native, each_width

_FOLDER = Path(__file__).parent

NATIVE = Native(
    "image_codes",
    each_width((_FOLDER / "codes.c",), flags=("-fno-math-errno", "-fno-trapping-math")),
    registration=_FOLDER / "registration.cpp",
    otherwise="inputs of int8 convolutions are rounded in PyTorch",
)
