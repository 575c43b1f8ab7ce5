"""Quantizing where new tensors go elsewhere than the model lies: `torch.set_default_device`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import Scheme
from lezero.compress.quantize.weights import CodedWeight, PackedWeight
from lezero.ops.adamw import eight_bit
from lezero.ops.linear import conv
from lezero.ops.quantize import Grid


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential()
    for _ in range(2):
        feed = (nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        made.append(nn.Sequential(*feed))
    return made


SCHEMES: dict[str, Scheme] = {
    "int8": lz.Int8Weight(scales="mse"),
    "corrected": lz.Int8Weight(bias_correction=True),
    "smooth": lz.Int8WeightActivation(),
    "gptq": lz.Int4Weight(group=32, method="gptq"),
    "awq": lz.Int4Weight(group=32, method="awq"),
    "hqq": lz.Int4Weight(group=32, method="hqq"),
    "fp8": lz.Fp8(),
    "nf4": lz.Nf4(group=32),
}
OBSERVERS: tuple[Any, ...] = ("minmax", "percentile", "kl", "mse")
SCHEMES |= {x: lz.Int8WeightActivation(activations="tensor", observer=x) for x in OBSERVERS}


@pytest.mark.parametrize("name", SCHEMES)
def test_the_default_device_changes_nothing(name: str, tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    expected = lz.quantize_(blocks(), SCHEMES[name], data=x, objective="size")
    model = blocks()
    with torch.device("meta"):
        lz.quantize_(model, SCHEMES[name], data=x, objective="size")
        lz.save_quantized(model, tmp_path / "kept")
    for (key, found), other in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        if isinstance(found, Tensor):
            assert torch.equal(found, other), key
    with torch.no_grad():
        wanted = expected(x)
        assert torch.equal(model(x), wanted)
    empty = blocks()
    with torch.device("meta"):
        lz.load_quantized(tmp_path / "kept", empty)
    with torch.no_grad():
        assert torch.equal(empty(x), wanted)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="packs by oneDNN")
def test_nor_where_ops_keep_tensors() -> None:
    """Compiled code enters them past the mode that a call from Python leaves outside."""
    weight = torch.ones(16, 8, 3, 3, dtype=torch.int8)
    with torch.device("meta"):
        packed = conv._prepacked(weight, ([1, 1], [0, 0], [1, 1]), 1)
        table = eight_bit.tables.__wrapped__()
    assert packed.device == table.device == weight.device


@pytest.mark.parametrize("kind", [PackedWeight, CodedWeight])
def test_a_weight_lies_on_one_device(kind: Any) -> None:
    """Buffers elsewhere would be refused by DDP over NCCL."""
    with torch.device("meta"):
        weight = kind(Grid("int8"), (32, 64), torch.bfloat16)
    assert {x.device.type for x in weight.buffers()} == {"meta"}
    assert weight.dtype == torch.bfloat16
    model = nn.ModuleList([weight]).to(torch.float16).to_empty(device="cpu")
    assert model[0].dtype == torch.float16
