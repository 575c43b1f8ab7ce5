"""The compressed-tensors layout, read by that package in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lezero as lz
from lezero.compress.quantize import Scheme, save_quantized
from lezero.models import Transformer
from tests.compress.test_quantize import small, tokens

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors", reason="pip install --no-deps compressed-tensors loguru")

KEEP = {"activations": "tensor", "smooth": None, "vocabulary": "keep"}
# Name → scheme, and the largest relative difference of logits: a token's scale is |x|max / 127
# here and |x|max / 127.5 there, and heads are written as floats.
SCHEMES: dict[str, tuple[Scheme, float]] = {
    "W4A16": (lz.Int4Weight(group=32, zero_point=False, method="gptq"), 2e-3),
    "W8A16": (lz.Int8Weight(), 2e-3),
    "W8A8": (lz.Int8WeightActivation(), 2e-2),
    "W8A8 static": (lz.Int8WeightActivation(**KEEP), 2e-3),
}


def quantized(scheme: Scheme, tied: bool = False) -> Transformer:
    return lz.quantize_(small(tied), scheme, data=tokens(), objective="size")


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    scheme, bound = SCHEMES[name]
    model = quantized(scheme, tied=name == "W8A16")
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        wanted, found = model(tokens()[0]), theirs(tokens()[0]).logits
    assert float((found - wanted).norm() / wanted.norm()) < bound
    layer = "layers.1.mlp.down_proj"
    there = theirs.model.get_submodule(layer).weight
    torch.testing.assert_close(there, model.get_submodule(layer).weight.decode(torch.float32))
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["format"] == ("int-quantized" if "A8" in name else "pack-quantized")


def test_zero_points_lie_as_the_package_reads_them(tmp_path: Path) -> None:
    """transformers 5.23 itself opens no packed zero points: it makes room for unpacked ones."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    model = quantized(lz.Int4Weight(group=32))
    save_quantized(model, tmp_path, layout="compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    layer = "layers.1.mlp.down_proj"
    start = f"model.{layer}."
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {n.removeprefix(start): x for n, x in tensors.items() if n.startswith(start)}
    found = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    torch.testing.assert_close(found, model.get_submodule(layer).weight.decode(torch.float32))


def test_what_the_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    for scheme, said in (
        (lz.Nf4(group=32), "nf4"),
        (lz.Int4Weight(group=32, method="hqq"), "whole numbers"),
    ):
        with pytest.raises(lz.ConfigError, match=said):
            save_quantized(quantized(scheme), tmp_path / "x", layout="compressed-tensors")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    with pytest.raises(lz.ConfigError, match="allowed is a model of"):
        save_quantized(model, tmp_path / "x", layout="compressed-tensors")
    with pytest.raises(lz.ConfigError, match="layout: got 'onnx'"):
        save_quantized(model, tmp_path / "x", layout="onnx")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
