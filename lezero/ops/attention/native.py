"""Finds, builds and loads the attention kernel for this machine.

A kernel is a set of C files for one instruction set; a new one (AMX, AVX2) is a row of `_KERNELS`,
fastest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lezero.core.facts import instruction_sets
from lezero.core.log import logger
from lezero.ops.build import BuildError, Source, build

_FOLDER = Path(__file__).parent
_loaded: bool | None = None


@dataclass(frozen=True)
class _Kernel:
    name: str
    needs: frozenset[str]
    files: tuple[str, ...]
    flags: tuple[str, ...]

    def sources(self) -> list[Source]:
        native = [Source(_FOLDER / file, self.flags) for file in self.files]
        return [*native, Source(_FOLDER / "registration.cpp")]


_KERNELS = (
    _Kernel(
        "avx512_bf16",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}),
        ("avx512_bf16_forward.c", "avx512_bf16_backward.c"),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
    ),
)


def kernel_name() -> str:
    """The kernel that suits this machine's instruction sets, "" if there is none."""
    has = set(instruction_sets())
    return next((kernel.name for kernel in _KERNELS if kernel.needs <= has), "")


def available() -> bool:
    """True where the kernel runs: builds it (a few seconds, once a machine) and loads it.

    Where it cannot be built, one line of the log says why, and attention stays torch's.
    """
    global _loaded  # not functools.cache, which torch.compile cannot trace
    if _loaded is None:
        _loaded = _load()
    return _loaded


def _load() -> bool:
    name = kernel_name()
    if not name:
        return False
    kernel = next(kernel for kernel in _KERNELS if kernel.name == name)
    try:
        torch.ops.load_library(build(f"attention-{name}", kernel.sources()))
    except (BuildError, OSError) as error:
        logger("ops").warning("attention stays PyTorch's: %s", error)
        return False
    return True
