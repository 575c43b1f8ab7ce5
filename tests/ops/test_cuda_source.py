"""Where the compiler of CUDA kernels is looked for; what it compiles, test_cuda_few.py has."""

from __future__ import annotations

import ctypes
import site
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lezero.ops import cuda_source

BUILTINS = "libnvrtc-builtins.so.13.0"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What is loaded, in order, in a folder whose own builtins nobody should take."""
    found: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode=0: found.append(path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "beside" / "torch" / "__init__.py"))
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "wheels")])
    (tmp_path / BUILTINS).touch()
    monkeypatch.chdir(tmp_path)
    cuda_source._nvrtc.cache_clear()
    yield found
    cuda_source._nvrtc.cache_clear()


def test_the_systems_compiler_is_loaded_by_its_name_alone(loaded: list[str]) -> None:
    cuda_source._nvrtc()
    assert loaded == ["libnvrtc.so.13"]


def test_builtins_of_a_wheel_come_before_its_compiler(loaded: list[str], tmp_path: Path) -> None:
    wheel = tmp_path / "wheels" / "nvidia" / "cu13" / "lib"
    wheel.mkdir(parents=True)
    for name in (BUILTINS, "libnvrtc.so.13"):
        (wheel / name).touch()
    cuda_source._nvrtc()
    assert loaded == [str(wheel / BUILTINS), str(wheel / "libnvrtc.so.13")]
