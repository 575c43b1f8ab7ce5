"""Quantized convolutions in models that were built for torch's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.modules import quantized_layers
from tests.compress.test_quantize import difference


class LeNet(nn.Module):
    """Its `.view` takes contiguous outputs only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 6, 5), nn.Conv2d(6, 16, 5)
        self.head = nn.Linear(400, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x).relu(), 2)
        x = F.max_pool2d(self.second(x).relu(), 2)
        return self.head(x.view(-1, 400))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("scheme", [lz.Int8WeightActivation(), lz.Int8Weight()], ids=str)
@torch.no_grad()
def test_a_view_behind_convolutions(scheme: Any, channels: int) -> None:
    torch.manual_seed(0)
    model, x = LeNet(channels).eval(), torch.randn(4, channels, 32, 32)
    wanted = model(x)
    lz.quantize_(model, scheme, data=[x], objective="size")
    assert len(quantized_layers(model)) == 3
    assert difference(model(x), wanted) < 0.1
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


@torch.no_grad()
def test_images_that_lie_channels_last_stay_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    lz.quantize_(model, lz.Int8WeightActivation(), data=x, objective="size")
    assert model(x).is_contiguous()
    last = model(x.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, model(x))


def images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()


@pytest.mark.parametrize("scheme", [lz.Int8WeightActivation(), lz.Int8Weight()], ids=str)
@torch.no_grad()
def test_a_model_that_lies_channels_last_stays_so(scheme: Any, tmp_path: Path) -> None:
    model = images().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8)
    wanted = model(x)
    lz.quantize_(model, scheme, data=x, objective="size")
    found = model(x)
    assert found.stride() == wanted.stride()
    lz.save_quantized(model, tmp_path / "q")
    loaded = lz.load_quantized(tmp_path / "q", images())
    assert torch.equal(loaded(x), found)
    assert loaded(x).stride() == wanted.stride()
    turned = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    assert torch.equal(turned(x), found)
    assert turned(x).is_contiguous()
    assert turned.to(memory_format=torch.channels_last)(x).stride() == wanted.stride()
    save_file(model.state_dict(), tmp_path / "plain.safetensors")  # which takes contiguous tensors


@pytest.mark.parametrize("scheme", [lz.Int8WeightActivation(), lz.Int8Weight()], ids=str)
def test_its_bits_are_those_of_all_that_it_holds(scheme: Any) -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3))
    lz.quantize_(model, scheme, data=torch.randn(2, 8, 9, 9), objective="size")
    (layer,) = lz.quantization_report(model).layers
    held = {key: x.nbytes for key, x in model.state_dict().items() if key != "0.bias"}
    assert ("0.input_zero" in held) == isinstance(scheme, lz.Int8WeightActivation)
    assert layer.bits == 8 * sum(held.values()) / layer.weights
