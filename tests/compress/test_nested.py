"""Encoders of torch that hold quantized layers take padded batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz

MASK = torch.arange(6) >= torch.tensor([[6], [3]])
"""True where a batch of two is padded."""


def encoder() -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.parametrize("kept", ["layers.0.*", "layers.1.*"])
@torch.no_grad()
def test_padded_batches_go_through_a_model_of_which_parts_are_quantized(
    kept: str, tmp_path: Path
) -> None:
    model, x = encoder(), torch.randn(2, 6, 64)
    wanted = model(x, src_key_padding_mask=MASK)[~MASK]
    lz.quantize_(model, lz.Int8Weight(), filter=f"!{kept}", objective="size")
    lz.save_quantized(model, tmp_path / "saved")
    loaded = lz.load_quantized(tmp_path / "saved", encoder())
    for each in (model, copy.deepcopy(model), loaded):
        found = each(x, src_key_padding_mask=MASK)[~MASK]
        assert float((found - wanted).norm() / wanted.norm()) < 0.02
    lz.dequantize_(model)
    assert model.use_nested_tensor
    assert model(x, src_key_padding_mask=MASK)[~MASK].shape == wanted.shape


def test_an_encoder_in_which_nothing_was_kept_stays_as_it_was() -> None:
    model = encoder()
    with pytest.raises(lz.ConfigError):
        lz.quantize_(model, lz.Int8Weight(), filter="none", objective="size")
    assert model.use_nested_tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Fp8(activations="token")])
@torch.no_grad()
def test_an_encoder_of_which_a_part_was_quantized_by_itself_is_told_what_to_do(scheme: Any) -> None:
    model, x = encoder(), torch.randn(2, 6, 64)
    lz.quantize_(model.layers[1], scheme, objective="size")
    with pytest.raises(lz.ConfigError, match="use_nested_tensor = False"):
        model(x, src_key_padding_mask=MASK)
    model.use_nested_tensor = False
    assert model(x, src_key_padding_mask=MASK).shape == x.shape
