"""Folders loaded into modules of transformers: built on meta, and with parameters that are tied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize.batches import tensors_of
from lezero.nn.meta import parameters_on_meta
from tests.compress.test_huggingface import HEADS, MODELS, TEXT, ids, make
from tests.compress.test_saved import change, saved

pytest.importorskip("transformers")
LLAMA = {**TEXT, **HEADS, "num_key_value_heads": 2}
BUILDS = {
    **{name: MODELS[name][0] for name in ("bert", "gpt2", "t5", "vit", "resnet", "mobilenet")},
    "llama": make("LlamaForCausalLM", "LlamaConfig", **LLAMA, tie_word_embeddings=True),
    "mixtral": make("MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4),
    "bert head": make("BertForMaskedLM", "BertConfig", **TEXT, **HEADS),
}
COMPUTED = {"llama", "mixtral", "bert", "bert head"}  # have buffers that are never saved
KEEP = lz.Int4Weight(group=32, vocabulary="keep")


def batch(name: str) -> dict[str, Any]:
    return MODELS[name][1]() if name in MODELS else ids()


def quantized(name: str, folder: Path, scheme: Any) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """The quantized model in `folder`, one to load it into, and a batch."""
    torch.manual_seed(0)
    model, data = BUILDS[name]().eval(), batch(name)
    lz.quantize_(model, scheme, data=[data], objective="size")
    lz.save_quantized(model, folder)
    return model, BUILDS[name](), data


def same(one: nn.Module, two: nn.Module, data: dict[str, Any]) -> bool:
    with torch.no_grad():
        outputs = [tensors_of(model(**data)) for model in (one, two)]
    return all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))


def tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


@pytest.mark.parametrize("name", BUILDS)
def test_models_are_loaded_into_modules_without_memory(name: str, tmp_path: Path) -> None:
    scheme = lz.Int8WeightActivation(activations="tensor")
    model, other, data = quantized(name, tmp_path / "q", scheme)
    with parameters_on_meta():
        built = BUILDS[name]()
    assert all(parameter.is_meta for parameter in built.parameters())
    assert same(model, lz.load_quantized(tmp_path / "q", built), data)
    with torch.device("meta"):
        built = BUILDS[name]()
    if name in COMPUTED:
        with pytest.raises(lz.FileError, match=r"on the meta device.*parameters_on_meta"):
            lz.load_quantized(tmp_path / "q", built)
        assert not any("packed" in key for key in built.state_dict())
    else:
        assert same(model, lz.load_quantized(tmp_path / "q", built), data)
    assert same(model, lz.load_quantized(tmp_path / "q", other), data)


@pytest.mark.parametrize("name", ["llama", "bert head", "gpt2", "t5"])
def test_parameters_that_were_one_stay_one(name: str, tmp_path: Path) -> None:
    model, other, data = quantized(name, tmp_path / "q", KEEP)
    with parameters_on_meta():
        built = BUILDS[name]()
    assert tied(model)
    for given in (other, built):
        found = lz.load_quantized(tmp_path / "q", given)
        assert tied(found) == tied(model)
        assert same(model, found, data)


def test_our_own_tied_model_stays_tied(tmp_path: Path) -> None:
    model = saved(tmp_path / "q", KEEP)
    assert tied(lz.load_quantized(tmp_path / "q")) == tied(model)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.two.bias = self.one.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu())


def test_what_a_bias_correction_made_two_comes_back_as_two(tmp_path: Path) -> None:
    model, x = Twice(), torch.randn(64, 32)
    lz.quantize_(model, lz.Int4Weight(group=32, bias_correction=True), data=[x], objective="size")
    assert not torch.equal(model.one.bias, model.two.bias)
    lz.save_quantized(model, tmp_path / "q")
    found = lz.load_quantized(tmp_path / "q", Twice())
    assert torch.equal(found.one.bias, model.one.bias)
    assert torch.equal(found.two.bias, model.two.bias)


def test_a_folder_without_its_manifest_is_called_damaged(tmp_path: Path) -> None:
    quantized("gpt2", tmp_path / "q", KEEP)
    (tmp_path / "q/manifest.json").unlink()
    with pytest.raises(lz.FileError, match=r"manifest\.json is missing.*damaged"):
        lz.load_quantized(tmp_path / "q", BUILDS["gpt2"]())
    mark = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    assert mark["quant_method"] == "lezero"


def rooted() -> nn.Module:
    """A layer that is the model itself, with a layer of the same shape inside."""
    root = nn.Linear(32, 32)
    root.adapter = nn.Linear(32, 32)
    root.register_forward_hook(lambda module, args, y: y + module.adapter(args[0]))
    return root


def test_a_layer_inside_of_a_layer_keeps_its_own_weight(tmp_path: Path) -> None:
    model, x = rooted(), torch.randn(4, 32)
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    lz.save_quantized(model, tmp_path / "q")
    found = lz.load_quantized(tmp_path / "q", rooted())
    assert found.weight is not found.adapter.weight
    assert torch.equal(found(x), model(x))


def test_a_bias_that_the_manifest_denies_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    lz.save_quantized(lz.quantize_(model, lz.Int8Weight(), objective="size"), tmp_path / "q")
    layers = ("documents", "quantization", "layers", "0")

    def deny(fields: Any) -> None:
        for key in layers:
            fields = fields[key]
        fields["bias"] = False

    change(tmp_path / "q", deny)
    with pytest.raises(lz.FileError, match=r"0\.bias is there, and the manifest says"):
        lz.load_quantized(tmp_path / "q", nn.Sequential(nn.Linear(64, 64)))
