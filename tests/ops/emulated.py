"""Kernels in CUDA C++ on a processor, by `emulated.h`: slow, but every line of them runs."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.core import device
from lezero.ops import cuda_source
from lezero.ops.build import compilers, kept

_HEADER = Path(__file__).with_name("emulated.h")
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-x", "c++", "-w")
_CHECKED = ("-fsanitize=alignment,shift,bounds", "-fsanitize-undefined-trap-on-error")


class EmulatedKernel(cuda_source.CudaKernel):
    """One function of a source."""

    def __init__(self, library: bytes) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder, "kernel.so")
            path.write_bytes(library)
            self._run = ctypes.CDLL(str(path)).emulated

    def launch(
        self,
        place: torch.device,
        blocks: Sequence[int],
        threads: int,
        arguments: Sequence[Any],
        early: bool,
        shared: int = 0,
    ) -> None:
        values = [cuda_source._value(one) for one in arguments]
        addresses = [ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in values]
        grid = (ctypes.c_int * 3)(*blocks, *[1] * (3 - len(blocks)))
        # Of all kernels the first argument is what the launch ahead of them made.
        late = arguments[0] if arguments else None
        ahead, size = (late.data_ptr(), late.nbytes) if isinstance(late, Tensor) else (0, 0)
        self._run(
            (ctypes.c_void_p * len(addresses))(*addresses),
            *(grid, threads, shared, ctypes.c_void_p(ahead), ctypes.c_longlong(size)),
        )


@functools.cache
def _emulated(
    source: Path, name: str, capability: tuple[int, int], given: tuple[tuple[str, int], ...]
) -> EmulatedKernel:
    parts = (_HEADER, *cuda_source.parts_of(source))
    text = "".join(f'#line 1 "{part}"\n{part.read_text("utf-8")}' for part in parts)
    text = text.replace("extern __shared__", "extern") + f"LAUNCHES({name})\n"
    command = [compilers()[1], *_FLAGS, *_CHECKED, *(f"-D{key}={value}" for key, value in given)]
    made_from = cuda_source._digest(text, *command)
    return EmulatedKernel(kept(f"emulated-{name}", made_from, lambda: _compiled(command, text)))


def _compiled(command: Sequence[str], text: str) -> bytes:
    with TemporaryDirectory() as folder:
        library = Path(folder, "kernel.so")
        made = subprocess.run(
            [*command, "-o", library, "-"], input=text, capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stderr
        return library.read_bytes()


def take_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "_kernel", _emulated)
    monkeypatch.setattr(device, "capability_of", lambda place: (9, 0))
