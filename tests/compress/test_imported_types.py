"""GPTQ and AWQ folders whose floats, files or settings are not as the usual tools write them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import load_quantized, save_quantized
from lezero.compress.quantize.foreign import Foreign, read_layer
from lezero.compress.quantize.modules import quantized_layers
from tests.compress.test_imported import FORMS, GPTQ, OneLayer, folder, one_layer, words
from tests.compress.test_quantize import tokens


def change(root: Path, **changed: Any) -> None:
    """Other entries of config.json."""
    path = root / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def rewrite(root: Path, **changed: Tensor) -> None:
    """Other tensors."""
    path = root / "model.safetensors"
    save_file({**load_file(path), **changed}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["gptq", "gptq act-order"])
def test_weights_decode_to_the_type_of_the_other_floats(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder(tmp_path / "in", FORMS[form])
    path = tmp_path / "in" / "model.safetensors"
    tensors = load_file(path)
    rest = {n: x for n, x in tensors.items() if x.dtype == torch.float32}
    wide = {"model.norm.weight": rest["model.norm.weight"]}  # few values decide nothing
    save_file({**tensors, **{n: x.to(dtype) for n, x in rest.items()}, **wide}, path)
    model = load_quantized(tmp_path / "in")
    for layer in quantized_layers(model).values():
        assert layer.weight.dtype == dtype
        assert layer.weight.scale.dtype == torch.float16
    model.norm.to(dtype)
    with torch.no_grad():
        wanted = model(tokens()[0])
    save_quantized(model, tmp_path / "out")
    for made in (load_quantized(tmp_path / "out"), model):
        exact = {n: x.weight.decode(torch.float32) for n, x in quantized_layers(made).items()}
        lz.dequantize_(made)
        for name, weight in exact.items():
            assert torch.equal(made.get_submodule(name).weight, weight.to(dtype)), name
        with torch.no_grad():
            torch.testing.assert_close(made(tokens()[0]), wanted, rtol=0.1, atol=0.1)


def test_weights_decode_to_the_type_of_their_scales_where_nothing_else_is(tmp_path: Path) -> None:
    zeros = torch.full((32, 1), 8)
    one_layer(tmp_path, {**GPTQ, "group_size": -1}, zeros, words(zeros.T - 1, 4))
    model = load_quantized(tmp_path, OneLayer())
    assert quantized_layers(model)["up"].weight.dtype == torch.float16


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e8m0fnu", "float64"])
def test_floats_that_nothing_computes_with_are_refused(name: str, tmp_path: Path) -> None:
    folder(tmp_path, GPTQ)
    rewrite(tmp_path, **{"model.norm.weight": torch.ones(64).to(getattr(torch, name))})
    said = rf"norm\.weight is torch\.{name}, convert it to fp32, bf16 or fp16"
    with pytest.raises(lz.FileError, match=said):
        load_quantized(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "gptq_model-4bit-32g.safetensors"])
def test_what_is_no_regular_file_is_not_opened(name: str, tmp_path: Path) -> None:
    folder(tmp_path, GPTQ)
    whole, path = tmp_path / "model.safetensors", tmp_path / name
    whole.unlink()
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to(tmp_path / "nothing")):
        make(path)
        with pytest.raises(lz.FileError, match=rf"{name}: not a regular file"):
            load_quantized(tmp_path)
        (path.rmdir if path.is_dir() else path.unlink)()


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, GPTQ)
    rewrite(tmp_path, **{"norm.weight": torch.zeros(64)})
    with pytest.raises(
        lz.FileError, match=r"'norm\.weight', which model\.safetensors holds too, as"
    ):
        load_quantized(tmp_path)


def test_a_problem_of_one_tensor_hides_no_other_of_a_name_within(tmp_path: Path) -> None:
    class Named(OneLayer):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.ParameterDict({"w": torch.ones(2), "ww": torch.ones(2)})

    zeros = torch.full((32, 1), 8)
    one_layer(tmp_path, {**GPTQ, "group_size": -1}, zeros, words(zeros.T - 1, 4))
    rewrite(tmp_path, **{"one.ww": torch.ones(3)})
    with pytest.raises(lz.FileError, match=r"one\.ww is \(3,\), .*; missing one\.w$"):
        load_quantized(tmp_path, Named())


def test_a_config_that_is_wrong_is_of_the_file(tmp_path: Path) -> None:
    folder(tmp_path, GPTQ)
    wrong = {"hidden_size": (-64, 64), "num_key_value_heads": (3, 4), "vocab_size": ("many", 128)}
    for name, (value, right) in wrong.items():
        change(tmp_path, **{name: value})
        with pytest.raises(lz.FileError, match=rf"config\.json.* got '?{value}"):
            load_quantized(tmp_path)
        change(tmp_path, **{name: right})


@pytest.mark.parametrize("key", ["format", "checkpoint_format"])
def test_awq_by_the_newer_name_of_its_version(key: str, tmp_path: Path) -> None:
    folder(tmp_path, FORMS["awq"])
    form = {name: value for name, value in FORMS["awq"].items() if name != "version"}
    change(tmp_path, quantization_config={**form, key: "gemv"})
    with pytest.raises(lz.FileError, match="awq with version 'gemv'; read is 'gemm'"):
        load_quantized(tmp_path)
    change(tmp_path, quantization_config={**form, key: "gemm"})
    load_quantized(tmp_path)


def of_zeros(N: int, K: int) -> dict[str, Tensor]:
    """A layer in groups of 32, the last of them cut short."""
    groups = -(-K // 32)
    return {
        "qweight": torch.zeros(K // 8, N, dtype=torch.int32),
        "qzeros": torch.zeros(groups, N // 8, dtype=torch.int32),
        "scales": torch.ones(groups, N, dtype=torch.float16),
        "g_idx": torch.arange(K) // 32,
    }


def test_parts_of_another_type_are_refused_with_what_they_should_hold() -> None:
    N, K = 32, 64
    parts = of_zeros(N, K)
    read_layer(parts, (N, K), Foreign(**GPTQ))
    for name, dtype, said in (
        ("qweight", torch.int64, "holds torch.int64, it should hold torch.int32; write"),
        ("qzeros", torch.uint8, "holds torch.uint8, it should hold torch.int32; write"),
        ("scales", torch.float64, "holds torch.float64, it should hold torch.float32 or torch.fl"),
        ("g_idx", torch.complex64, r"is torch.complex64 \(64,\), it should be torch.int32 \(64,\)"),
        ("g_idx", torch.bool, r"is torch.bool \(64,\), it should be torch.int32 \(64,\)"),
    ):
        with pytest.raises(ValueError, match=f"{name} {said}"):
            read_layer({**parts, name: parts[name].to(dtype)}, (N, K), Foreign(**GPTQ))
    cut = {**parts, "scales": parts["scales"][:1]}
    with pytest.raises(ValueError, match=r"should be \(2, 32\) .*; correct these in the quantiza"):
        read_layer(cut, (N, K), Foreign(**GPTQ))


def test_what_is_wrong_with_the_groups_is_told() -> None:
    N, K = 32, 80
    parts = of_zeros(N, K)
    for place, group, said in (
        (5, -1, r"g_idx\[5\] is -1, it should be 0 to 2; correct group_size, or copy"),
        (79, 3, r"g_idx\[79\] is 3, it should be 0 to 2"),
        (0, 2, "g_idx puts 31 inputs in group 0, it should be 32"),
        (79, 1, "g_idx puts 33 inputs in group 1, it should be 32"),
    ):
        g_idx = parts["g_idx"].clone()
        g_idx[place] = group
        with pytest.raises(ValueError, match=said):
            read_layer({**parts, "g_idx": g_idx}, (N, K), Foreign(**GPTQ))


def test_a_layer_without_its_codes_is_named(tmp_path: Path) -> None:
    folder(tmp_path, GPTQ)
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.qweight"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(lz.FileError, match=r"'layers\.0\.mlp\.up_proj': qweight is missing; copy"):
        load_quantized(tmp_path)


def test_another_kind_of_model_is_to_be_given(tmp_path: Path) -> None:
    zeros = torch.full((32, 2), 8)
    one_layer(tmp_path, GPTQ, zeros, words(zeros.T - 1, 4))
    change(tmp_path, model_type="opt")
    with pytest.raises(
        lz.FileError, match=r"'opt' is not built here.* lz.load_quantized.folder, m"
    ):
        load_quantized(tmp_path)
    assert "up" in quantized_layers(load_quantized(tmp_path, OneLayer()))


class Tied(OneLayer):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 64)
        self.words.weight = self.up.weight


def test_codes_of_a_weight_that_is_another_layers_too_are_refused(tmp_path: Path) -> None:
    zeros = torch.full((32, 2), 8)
    one_layer(tmp_path, GPTQ, zeros, words(zeros.T - 1, 4))
    rewrite(tmp_path, **{"words.weight": torch.ones(32, 64)})
    model = Tied()
    with pytest.raises(lz.FileError, match=r"its weight is that of 'words' too.* tie_word_embed"):
        load_quantized(tmp_path, model)
    assert model.words.weight is model.up.weight


class Masked(OneLayer):
    _keys_to_ignore_on_load_unexpected = (r"attention.bias",)


def test_masks_in_older_files_are_passed_over(tmp_path: Path) -> None:
    zeros = torch.full((32, 1), 8)
    one_layer(tmp_path, {**GPTQ, "group_size": -1}, zeros, words(zeros.T - 1, 4))
    mask = {"h.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)}
    rewrite(tmp_path, **mask, **{"h.0.attention.masked_bias": torch.tensor(-1e9)})
    assert "up" in quantized_layers(load_quantized(tmp_path, Masked()))
    with pytest.raises(lz.FileError, match=r"model: unexpected h\.0\.attention\.bias$"):
        load_quantized(tmp_path, OneLayer())
