"""The compressed-tensors layout, read by that package in transformers."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import Scheme, save_quantized
from lezero.compress.quantize.elsewhere import unreadable
from lezero.compress.quantize.exported import why_not_exported
from lezero.compress.quantize.modules import QuantizedLinear, quantized_layers
from lezero.compress.quantize.weights import PackedWeight
from lezero.data.tokenizer import bytes_tokenizer
from lezero.models import Transformer, TransformerConfig
from lezero.ops.quantize import Grid, Quantized, quantize
from tests.compress.test_quantize import small, tokens

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors", reason="pip install --no-deps compressed-tensors loguru")

KEEP = {"activations": "tensor", "smooth": None, "vocabulary": "keep"}
SCHEMES: dict[str, Scheme] = {
    "W4A16": lz.Int4Weight(group=32, zero_point=False, method="gptq"),
    "W8A16": lz.Int8Weight(),
    "W8A8 static": lz.Int8WeightActivation(**KEEP),
}
ZERO_POINTS: dict[str, Scheme] = {
    "int4": lz.Int4Weight(group=32),
    "int8": lz.Int8Weight(group=32, zero_point=True),
}
LAYER = "layers.1.mlp.down_proj"
# The products are ours with 16-bit fixed-point activations, and theirs in fp32.
EQUAL = 1e-4


def quantized(scheme: Scheme, tied: bool = False) -> Transformer:
    return lz.quantize_(small(tied), scheme, data=tokens(), objective="size")


def opened(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found = model(tokens()[0])
    return found if isinstance(found, Tensor) else found.logits


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def same_weights(theirs: Any, ours: Transformer) -> None:
    there, here = theirs.model.get_submodule(LAYER).weight, ours.get_submodule(LAYER).weight
    torch.testing.assert_close(there, here.decode(torch.float32))


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    model = quantized(SCHEMES[name], tied=name == "W8A16")
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    theirs = opened(tmp_path / "out")
    assert difference(logits(theirs), logits(model)) < EQUAL
    same_weights(theirs, model)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["format"] == ("int-quantized" if "A8" in name else "pack-quantized")


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", ZERO_POINTS)
def test_zero_points_open_where_weights_are_decoded(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kept compressed, transformers 5.23 makes room for unpacked zero points and refuses packed
    ones, which is how the package itself writes them."""
    model = quantized(ZERO_POINTS[name])
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    assert "CompressedTensorsConfig(dequantize=True)" in caplog.text
    decoded = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = opened(tmp_path / "out", quantization_config=decoded)
    assert difference(logits(theirs), logits(model)) < EQUAL
    same_weights(theirs, model)


def held(model: Transformer, name: str, grid: Grid) -> None:
    """Another grid for a layer's weight, as an import of GPTQ may have it."""
    layer: Any = model.get_submodule(name)
    made = quantize(layer.weight.decode(torch.float32), grid)
    layer.weight = PackedWeight.of(made, grid, torch.float32)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_layers_that_can_be_described_alike_are(tmp_path: Path) -> None:
    """transformers decodes all layers by the first description."""
    model = quantized(lz.Int4Weight(group=64, zero_point=True))
    held(model, LAYER, Grid("int4", 64))
    held(model, "layers.0.self_attn.q_proj", Grid("int4", "row", True))
    assert model.layers[0].self_attn.q_proj.weight.full_shape[1] == 64
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]
    decoded = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = opened(tmp_path / "out", quantization_config=decoded)
    assert difference(logits(theirs), logits(model)) < EQUAL
    same_weights(theirs, model)


def test_zero_points_in_the_middle_are_none(tmp_path: Path) -> None:
    """Symmetric checkpoints of 8 bits may have a code of -128, which our grid without zero points
    has not."""
    model = quantized(lz.Int8Weight())
    for name, layer in quantized_layers(model).items():
        weight: Any = layer.weight
        if isinstance(layer, QuantizedLinear) and name != "lm_head":
            codes, scale, _ = weight.unpacked()
            codes = codes.to(torch.int16) + 128
            codes[0, 0] = 0
            made = Quantized(codes.to(torch.uint8), scale, torch.full_like(scale, 128))
            layer.weight = PackedWeight.of(made, Grid("int8", "row", True), torch.float32)
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    theirs = opened(tmp_path / "out")
    assert difference(logits(theirs), logits(model)) < EQUAL
    same_weights(theirs, model)


def test_what_no_one_description_says_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = quantized(lz.Int4Weight(group=32, zero_point=True))
    held(model, LAYER, Grid("int4", "row", True))
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    assert "transformers opens no folder with zero points whose layers differ" in caplog.text


def rounded(model: Transformer, levels: float, low: int) -> Transformer:
    """What the codes of a W8A8 model mean in fp32, each token rounded by |x|max / levels."""
    made = copy.deepcopy(model)
    names = [n for n, m in quantized_layers(made).items() if isinstance(m, QuantizedLinear)]
    lz.dequantize_(made)

    def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        step = args[0].abs().amax(-1, keepdim=True) / levels
        return (torch.round(args[0] / step).clamp(low, 127) * step,)

    for name in names:
        made.get_submodule(name).register_forward_pre_hook(before)
    return made


def test_w8a8_differs_by_how_tokens_are_rounded_and_by_nothing_else(tmp_path: Path) -> None:
    """compressed-tensors takes |x|max / 127.5 for a token's step, LeZero |x|max / 127. Where sums
    are rounded otherwise, by processor, a code of 8 bits may fall elsewhere: some 6e-4."""
    model = quantized(lz.Int8WeightActivation(vocabulary="keep"))
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    theirs = opened(tmp_path / "out")
    assert difference(logits(theirs), logits(rounded(model, 127.5, -128))) < 2e-3
    assert difference(logits(model), logits(rounded(model, 127.0, -127))) < EQUAL
    assert difference(logits(theirs), logits(model)) > 3e-3
    same_weights(theirs, model)


def test_inputs_in_blocks_are_written_as_floats(tmp_path: Path) -> None:
    """The layout has no blocks of a token; the layers beside keep their 8 bits."""
    model = quantized(lz.Int8WeightActivation(vocabulary="keep", exact_above=None))
    model.get_submodule(LAYER).x_block = 32
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    floats = [g for g in config["config_groups"].values() if g["input_activations"] is None]
    assert [group["targets"] for group in floats] == [[f"model.{LAYER}"]]
    assert floats[0]["format"] == "pack-quantized"


def test_what_the_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    for scheme, said in (
        (lz.Nf4(group=32), "nf4"),
        (lz.Int4Weight(group=32, method="hqq"), "whole numbers"),
    ):
        with pytest.raises(lz.ConfigError, match=said):
            save_quantized(quantized(scheme), tmp_path / "x", layout="compressed-tensors")
    half = small().half()
    half.get_submodule(LAYER).weight.data[3] *= 1e-4
    lz.quantize_(half, lz.Int8Weight(), objective="size")
    with pytest.raises(lz.ConfigError, match=f"scales of '{LAYER}' down to .* in torch.float16"):
        save_quantized(half, tmp_path / "x", layout="compressed-tensors")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    with pytest.raises(lz.ConfigError, match="allowed is a model of"):
        save_quantized(model, tmp_path / "x", layout="compressed-tensors")
    with pytest.raises(lz.ConfigError, match="layout: got 'onnx'"):
        save_quantized(model, tmp_path / "x", layout="onnx")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    save_quantized(half.bfloat16(), tmp_path / "x", layout="compressed-tensors")


def test_a_last_group_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    shape = {**small(True).config.to_dict(), "ffn": 160}
    model = Transformer(TransformerConfig.parse(shape, "here")).eval()
    lz.quantize_(model, lz.Int4Weight(group=32), objective="size", filter="layers.*")
    layer = model.get_submodule(LAYER)
    grid = Grid("int4", 64)  # imported files have such groups
    exact = layer.weight.decode(torch.float32)
    layer.weight = PackedWeight.of(quantize(exact, grid), grid, torch.float32)
    said = r"down_proj' has 160 inputs in groups of 64, .* save with layout='lezero'"
    with pytest.raises(lz.ConfigError, match=said):
        save_quantized(model, tmp_path / "x", layout="compressed-tensors")
    assert not list(tmp_path.iterdir())
    save_quantized(model, tmp_path / "x", layout="lezero")


def test_biases_that_the_architecture_does_not_have_are_refused(tmp_path: Path) -> None:
    """transformers drops what config.json does not announce, without a word."""
    scheme = lz.Int8Weight(bias_correction=True)
    assert "bias_correction=False" in why_not_exported(scheme)
    said = r"'layers\.0\.mlp\.down_proj', .* and 10 more got biases.*bias_correction=False"
    with pytest.raises(lz.ConfigError, match=said):
        save_quantized(quantized(scheme), tmp_path / "x", layout="compressed-tensors")
    assert not list(tmp_path.iterdir())


def test_biases_that_the_architecture_has_are_written_corrected(tmp_path: Path) -> None:
    shape = small(True).config.to_dict()
    config = TransformerConfig.parse({**shape, "attention_bias": "qkvo", "mlp_bias": True}, "here")
    model = Transformer(config).eval()
    scheme = lz.Int8Weight(bias_correction=True)
    lz.quantize_(model, scheme, data=tokens(), objective="size", filter="layers.*")
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    assert difference(logits(opened(tmp_path / "out")), logits(model)) < EQUAL


def test_a_folder_of_floats_alone_is_not_written_as_quantized(tmp_path: Path) -> None:
    model = lz.quantize_(small(True), lz.Int8Weight(), filter=["embed_tokens"], objective="size")
    with pytest.raises(lz.ConfigError, match="no layer that it holds is quantized"):
        lz.save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    assert not (tmp_path / "out").exists()


def float_at(model: Transformer, *names: str) -> Transformer:
    """`model` with some layers as they were before they were quantized."""
    for name in names:
        weight = model.get_submodule(name).weight.decode()
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight = nn.Parameter(weight)
        model.set_submodule(name, layer)
    return model


@pytest.mark.parametrize(
    ("scheme", "left", "told"),
    [
        (lz.Int8Weight(), ("layers.0.self_attn.k_proj",), "one layer of q_proj, k_proj, v_proj"),
        (lz.Int8Weight(), ("layers.1.mlp.up_proj",), r"as in 'model\.layers\.1\.mlp'; quantize"),
        (lz.Int4Weight(group=32, zero_point=False, activations="token"), (), "int4 weights with"),
        (lz.Int8Weight(zero_point=True), (), "int8 with zero points"),
        (lz.Int8WeightActivation(group=32), (), "a scale a row"),
        (lz.Int8Weight(), ("layers.0.mlp.down_proj",), None),
    ],
)
def test_what_servers_do_not_open_is_told(
    scheme: Scheme,
    left: tuple[str, ...],
    told: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = float_at(quantized(scheme), *left)
    save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    assert (re.search(told, caplog.text) is not None) if told else not caplog.text


def test_the_output_head_is_left_by_its_name(tmp_path: Path) -> None:
    save_quantized(quantized(lz.Int8Weight()), tmp_path / "out", layout="compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]


def test_an_export_is_replaced_whole(tmp_path: Path) -> None:
    bytes_tokenizer().save(tmp_path / "tokenizer")
    first = save_quantized(
        *(quantized(lz.Int8Weight()), tmp_path / "out"),
        layout="compressed-tensors",
        tokenizer_folder=tmp_path / "tokenizer",
    )
    assert (first / "tokenizer.json").is_file()
    save_quantized(quantized(lz.Int8Weight()), first, layout="compressed-tensors")
    assert {path.name for path in first.iterdir()} == {"config.json", "model.safetensors"}
    (first / "1_Pooling").mkdir()
    (first / "1_Pooling/config.json").write_text("{}")
    (first / "modules.json").write_text('[{"path": "1_Pooling", "type": "a.Pooling"}]')
    (first / "notes.md").write_text("which of them was best")
    with pytest.raises(lz.FileError, match=r"other files \(1_Pooling, modules\.json, notes\.md\)"):
        save_quantized(quantized(lz.Int8Weight()), first, layout="compressed-tensors")


@pytest.mark.parametrize(
    ("bits", "group", "inputs", "told"),
    [(4, 256, 512, "groups of 256"), (8, None, 99, "99 inputs"), (4, None, 96, None)],
)
def test_layers_without_a_kernel_are_told(
    bits: int, group: int | None, inputs: int, told: str | None
) -> None:
    weights = {"num_bits": bits, "symmetric": True, "group_size": group}
    scheme = {"weights": weights, "input_activations": None}
    found = list(unreadable({"a": scheme, "b": scheme}, {"a": inputs, "b": inputs}))
    assert (len(found) == 1 and f"'a': {told}" in found[0]) if told else not found
