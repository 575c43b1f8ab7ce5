"""Where kernels in CUDA C++ run."""

from __future__ import annotations

import pytest
import torch

from lezero.core import device
from tests.ops.emulated import take_place


@pytest.fixture
def cuda_place(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """An NVIDIA GPU, or this processor in its stead."""
    if device.accelerator() != "cuda":
        take_place(monkeypatch)
    return device.device()
