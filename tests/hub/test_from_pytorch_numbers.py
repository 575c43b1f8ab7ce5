"""What `from_pytorch` says of weights that are no numbers."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from lezero.hub import from_pytorch


def test_outputs_that_are_no_numbers_say_nothing_of_how_weights_are_used(tmp_path: Path) -> None:
    path = tmp_path / "nan.safetensors"
    save_file({"weight": torch.full((4, 4), torch.nan), "bias": torch.zeros(4)}, path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        from_pytorch(nn.Linear(4, 4), str(path), example_inputs=torch.randn(2, 4))
    assert not any("do not depend" in str(one.message) for one in told)
