"""GPTQ and AWQ folders, packed here as their formats say, against the model they stand for."""

from __future__ import annotations

import json
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
from lezero.compress.quantize.ordered import OrderedWeight
from lezero.compress.quantize.weights import PackedWeight
from lezero.models import Transformer, TransformerConfig, save_hf
from lezero.models.hf_config import to_hf
from lezero.models.hf_writing import name_there
from lezero.nn.meta import parameters_on_meta
from lezero.ops.quantize import Grid, dequantize, quantize
from lezero.profiler import MemorySampler
from tests.compress.test_quantize import small, tokens
from tests.ranks import RankPool

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes (R, C) to int32 (R, C * bits / 32), one at a time, the first in the lowest bits."""
    rows = []
    for row in codes.tolist():
        packed = []
        for at in range(0, len(row), 32 // bits):
            word = sum(code << (bits * i) for i, code in enumerate(row[at : at + 32 // bits]))
            packed.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def awq_words(codes: Tensor) -> Tensor:
    """AutoAWQ: of each eight columns, column `AWQ_ORDER[i]` goes to nibble i."""
    order = [at + i for at in range(0, codes.shape[1], 8) for i in AWQ_ORDER]
    return words(codes[:, order], 4)


def quantized(name: str, weight: Tensor, form: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes near `weight`: the tensors of a file, and the float weight that they mean."""
    N, K = weight.shape
    drawn = torch.Generator().manual_seed(len(name))
    bits, high = form["bits"], (1 << form["bits"]) - 1
    G = 1 if form["group_size"] == -1 else K // GROUP
    groups = torch.arange(K) // (K // G)
    if form.get("desc_act"):
        groups = groups[torch.randperm(K, generator=drawn)]
    scales = (torch.rand(N, G, generator=drawn) * 0.02 + 0.01).half() / (high / 15)
    zeros = torch.full((N, G), (high + 1) // 2)
    if not form.get("sym"):
        # Format "gptq" has two rules for a zero point of 0, which have a test of their own.
        least = int(form["quant_method"] == "gptq" and "gptq_v2" not in form.values())
        zeros = torch.randint(least, high + 1, (N, G), generator=drawn)
    scale, zero = scales.float()[:, groups], zeros[:, groups]
    codes = (weight / scale + zero).round().clamp(0, high).long()
    if form["quant_method"] == "awq":
        parts = {"qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T)}
    else:
        second = form.get("checkpoint_format", form.get("format")) == "gptq_v2"
        ones = words(torch.ones(1, 32 // bits, dtype=torch.int64), bits)
        packed = words(zeros.T, bits)
        parts = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": packed if second else packed - ones,
            "g_idx": groups.to(torch.int32),
        }
    parts["scales"] = scales.T.contiguous()
    return {f"{name}.{part}": value for part, value in parts.items()}, (codes - zero) * scale


def folder(root: Path, form: dict[str, Any], tied: bool = False) -> Transformer:
    """Writes a checkpoint as other tools do; returns the float model that it means."""
    model = small(tied)
    save_hf(model, root)
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**config, "quantization_config": form}))
    tensors = load_file(root / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        layer = name.removesuffix(".weight")
        parts, weight = quantized(layer, tensors.pop(name), form)
        tensors |= parts
        model.get_parameter(name.removeprefix("model.")).data.copy_(weight)
        if "k_proj" in name:
            tensors[f"{layer}.bias"] = torch.zeros(len(weight))  # as AutoGPTQ writes
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    return model


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 32, bias=False)


def one_layer(root: Path, form: dict[str, Any], zeros: Tensor, packed: Tensor) -> Tensor:
    """Writes a layer of random codes and these zero points (32, G); the weight that it means."""
    G = zeros.shape[1]
    codes = torch.randint(0, 1 << form["bits"], (32, 64))
    scales = torch.full((G, 32), 0.125, dtype=torch.float16)
    parts = {"qweight": words(codes, form["bits"]).T, "qzeros": packed, "scales": scales}
    named = {f"up.{part}": value.contiguous() for part, value in parts.items()}
    save_file(named, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps({"quantization_config": form}))
    return (codes - zeros.repeat_interleave(64 // G, 1)) * 0.125


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
FORMS: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq symmetric": {**GPTQ, "sym": True, "group_size": -1},
    "gptq act-order": {**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "gptq 8 bits": {**GPTQ, "bits": 8},
    "gptq by the newer name": {**GPTQ, "format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
}


@pytest.mark.parametrize("name", FORMS)
def test_imported_folders_give_the_logits_of_their_float_model(name: str, tmp_path: Path) -> None:
    wanted = folder(tmp_path / "in", FORMS[name])
    found = load_quantized(tmp_path / "in")
    assert isinstance(found, Transformer)
    assert len(quantized_layers(found)) == 14
    for layer, module in quantized_layers(found).items():
        weight = wanted.get_parameter(f"{layer}.weight")
        assert torch.equal(module.weight.decode(torch.float32), weight), layer
    with torch.no_grad():
        torch.testing.assert_close(
            found.float()(tokens()[0]), wanted(tokens()[0]), rtol=1e-3, atol=1e-4
        )
    save_quantized(found, tmp_path / "out")
    again = load_quantized(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(tokens()[0]), found(tokens()[0]))


def test_inputs_of_another_width_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, FORMS["gptq act-order"])
    layer = load_quantized(tmp_path).layers[0].mlp.up_proj
    for width in (63, 65, 80):
        with pytest.raises(lz.ConfigError, match=r"allowed is \(…, 64\)"):
            layer(torch.randn(2, width))


def test_it_opens_in_a_module_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    wanted = folder(tmp_path, FORMS["awq"], tied=True)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(lz.FileError, match="inv_freq is on the meta device"):
        load_quantized(tmp_path, model)
    with parameters_on_meta():
        empty = transformers.AutoModelForCausalLM.from_config(config)
    for model in (transformers.AutoModelForCausalLM.from_config(config), empty):
        found = load_quantized(tmp_path, model)
        assert found is model
        assert found.lm_head.weight is found.model.embed_tokens.weight
        with torch.no_grad():
            torch.testing.assert_close(
                found(tokens()[0]).logits, wanted(tokens()[0]), rtol=1e-3, atol=1e-4
            )


def of_zeros(root: Path, layers: int) -> int:
    """Writes a checkpoint of 4.2 million weights a layer; the bytes of its file."""
    shape = {"dim": 512, "layers": layers, "heads": 4, "kv_heads": 4, "ffn": 2048}
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**shape, vocab=64, context=64))
    form = {**GPTQ, "sym": True, "group_size": 128}
    config = {**to_hf(model.config, "float32"), "quantization_config": form}
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, parameter in model.named_parameters():
        layer = name_there(name.removesuffix("weight"))
        if not name.endswith("_proj.weight"):
            tensors[layer + "weight"] = torch.ones(parameter.shape)
            continue
        N, K = parameter.shape
        tensors[layer + "qweight"] = torch.zeros(K // 8, N, dtype=torch.int32)
        tensors[layer + "qzeros"] = torch.full((K // 128, N // 8), 0x77777777, dtype=torch.int32)
        tensors[layer + "scales"] = torch.full((K // 128, N), 0.01, dtype=torch.float16)
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    return (root / "model.safetensors").stat().st_size


def opening(root: str) -> int:
    """In a process of its own: bytes above what was there that opening a folder takes."""
    torch.set_num_threads(1)
    load_quantized(f"{root}/small")  # what every process holds once
    with MemorySampler() as memory:
        model = load_quantized(f"{root}/large")
    assert len(quantized_layers(model)) == 7 * 16
    return memory.above


def test_no_more_than_a_layer_is_held_unpacked(tmp_path: Path, ranks: RankPool) -> None:
    of_zeros(tmp_path / "small", 1)
    size = of_zeros(tmp_path / "large", 16)
    (above,) = ranks(1, opening, str(tmp_path))
    assert above < 3 * size, above / size  # the file, which is mapped, what was packed, a layer


def test_gptq_of_a_model_with_transposed_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=1)
    wanted = transformers.GPT2LMHeadModel(config).eval()
    tensors = {n: x for n, x in wanted.state_dict().items() if n != "lm_head.weight"}
    for name in [n for n in tensors if ".c_" in n and n.endswith(".weight")]:
        layer = name.removesuffix(".weight")
        parts, weight = quantized(layer, tensors.pop(name).T, GPTQ)
        tensors |= parts
        wanted.get_parameter(name).data.copy_(weight.T)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    described = {**config.to_dict(), "quantization_config": GPTQ}
    (tmp_path / "config.json").write_text(json.dumps(described))
    found = load_quantized(tmp_path, transformers.GPT2LMHeadModel(config))
    assert len(quantized_layers(found)) == 4
    with torch.no_grad():
        logits = [model(tokens()[0]).logits for model in (found.float(), wanted)]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


BY_GPTQMODEL = ({"quantizer": "gptqmodel:1.4"}, {"quantizer": ["optimum:2", "GPTQModel:5"]})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("meta", [None, {"quantizer": "autogptq:0.7"}, *BY_GPTQMODEL])
def test_zero_points_of_0_are_read_as_their_writer_packed_them(
    bits: int, meta: Any, tmp_path: Path
) -> None:
    high = (1 << bits) - 1
    zeros = torch.randint(0, high + 1, (32, 2))
    zeros[::5] = 0
    if meta in BY_GPTQMODEL:
        ones = words(torch.ones(1, 32 // bits, dtype=torch.int64), bits)
        packed, said = words(zeros.T, bits) - ones, "as GPTQModel writes them"
    else:
        packed, said = words((zeros - 1).T & high, bits), "each by itself, as AutoGPTQ does"
    wanted = one_layer(tmp_path, {**GPTQ, "bits": bits, "meta": meta}, zeros, packed)
    with pytest.warns(UserWarning, match=f"zero points of 0 in 'up', .*{said}") as told:
        found = load_quantized(tmp_path, OneLayer())
    assert told[0].filename == __file__
    assert torch.equal(quantized_layers(found)["up"].weight.decode(torch.float32), wanted)


def test_an_order_that_is_missing_is_refused_where_it_counts(tmp_path: Path) -> None:
    def write(desc_act: bool, G: int) -> Tensor:
        size = -1 if G == 1 else GROUP
        form = {**GPTQ, "checkpoint_format": "gptq_v2", "desc_act": desc_act, "group_size": size}
        zeros = torch.full((32, G), 8)
        return one_layer(tmp_path, form, zeros, words(zeros.T, 4))

    write(desc_act=True, G=2)
    with pytest.raises(lz.FileError, match="'up': g_idx is missing, and desc_act is true"):
        load_quantized(tmp_path, OneLayer())
    for desc_act, G in ((False, 2), (True, 1)):
        wanted = write(desc_act, G)
        found = quantized_layers(load_quantized(tmp_path, OneLayer()))["up"]
        assert torch.equal(found.weight.decode(torch.float32), wanted)


def test_rows_of_an_ordered_weight_have_the_inputs_in_their_places() -> None:
    grid, order = Grid("int4", GROUP, scale_dtype="fp16"), torch.randperm(64)
    made = quantize(torch.randn(32, 64), grid)
    weight = OrderedWeight.ordered(made, order, grid, torch.float32)
    wanted = torch.empty(32, 64)
    wanted[:, order] = dequantize(*made, grid)
    ids = torch.tensor([3, 0])
    assert torch.equal(weight.decode(), wanted)
    assert torch.equal(weight.rows(ids), wanted[ids])


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_fills_up_the_last_int32_is_not_read(method: str) -> None:
    N, K = 30, 60
    codes, zeros = torch.randint(0, 16, (64, 32)), torch.randint(0, 16, (2, 32))
    if method == "awq":
        parts = {"qweight": awq_words(codes[:K]), "qzeros": awq_words(zeros)}
    else:
        parts = {"qweight": words(codes[:, :N].T, 4).T, "qzeros": words(zeros, 4)}
    scales = torch.rand(2, 32)
    parts["scales"] = scales[:, :N]
    form = {"quant_method": method, "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    layer = read_layer(parts, (N, K), Foreign(**form))
    zero, scale = (x.repeat_interleave(32, 0) for x in (zeros, scales))
    found = PackedWeight.of(layer.made, layer.grid, torch.float32).decode()
    assert torch.equal(found, ((codes - zero) * scale)[:K, :N].T)


def test_what_is_null_counts_as_not_given(tmp_path: Path) -> None:
    zeros = torch.full((32, 1), 8)
    form = {**dict.fromkeys(("checkpoint_format", "group_size", "desc_act", "dynamic"))}
    wanted = one_layer(tmp_path, {**GPTQ, **form}, zeros, words(zeros.T - 1, 4))
    found = quantized_layers(load_quantized(tmp_path, OneLayer()))["up"]
    assert torch.equal(found.weight.decode(torch.float32), wanted)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "aqlm"}, "'aqlm' is not read"),
    "bits": ({"bits": 3}, "bits 3; read are 4 and 8"),
    "group": ({"group_size": 24}, "group_size 24"),
    "group of 48": ({"group_size": 48}, "group_size 48; read are -1 and multiples of 32"),
    "some layers": ({"dynamic": {"-:lm_head": {}}}, "dynamic .other settings for some layers"),
    "another group": ({"group_size": 64}, r"should be \(2, "),
    "version": ({"quant_method": "awq", "version": "gemv"}, "'gemv'"),
    "layout": ({"checkpoint_format": "marlin"}, "'marlin'"),
    "text": ({"bits": "four"}, "bits: got 'four'"),
}


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gptq")
    folder(root, GPTQ)
    return root


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str, gptq: Path) -> None:
    config = json.loads((gptq / "config.json").read_text())
    change, said = REFUSED[name]
    try:
        text = json.dumps({**config, "quantization_config": {**GPTQ, **change}})
        (gptq / "config.json").write_text(text)
        with pytest.raises(lz.FileError, match=said):
            load_quantized(gptq)
    finally:
        (gptq / "config.json").write_text(json.dumps(config))


def test_a_quantized_head_of_a_tied_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = folder(tmp_path, GPTQ, tied=True)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    parts, weight = quantized("lm_head", model.embed_tokens.weight.detach(), GPTQ)
    tensors = load_file(file)
    save_file({**tensors, **parts}, file, metadata={"format": "pt"})
    with pytest.raises(lz.FileError, match=r"'lm_head' is quantized.* tie_word_embeddings to f"):
        load_quantized(tmp_path)
    told = {**json.loads(config.read_text()), "tie_word_embeddings": False}
    config.write_text(json.dumps(told))
    found = load_quantized(tmp_path).get_submodule("lm_head").weight
    assert torch.equal(found.decode(torch.float32), weight)


def test_a_model_that_is_quantized_takes_no_other(gptq: Path) -> None:
    model = load_quantized(gptq)
    with pytest.raises(lz.OrderError, match="give the float model, this one is quantized already"):
        load_quantized(gptq, model)


def test_tensors_that_do_not_fit_are_named(gptq: Path, tmp_path: Path) -> None:
    tensors = load_file(gptq / "model.safetensors")
    (tmp_path / "config.json").write_bytes((gptq / "config.json").read_bytes())
    layer = "model.layers.0.mlp.up_proj"

    def said(**changed: Tensor | None) -> str:
        kept = {**tensors, **{f"{layer}.{part}": value for part, value in changed.items()}}
        path = tmp_path / "model.safetensors"
        save_file({n: t for n, t in kept.items() if t is not None}, path)
        with pytest.raises(lz.FileError) as error:
            load_quantized(tmp_path)
        return str(error.value)

    scales = tensors[f"{layer}.scales"]
    assert "scales is missing" in said(scales=None)
    assert "scales is (1," in said(scales=scales[:1].contiguous())
    spoiled = scales.clone()
    spoiled[1, 5] = torch.nan
    assert "layer 'layers.0.mlp.up_proj': 1 of 256 values of scales are NaN" in said(scales=spoiled)
    assert "64 inputs in group 0, it" in said(g_idx=torch.zeros(64, dtype=torch.int32))
    assert "unexpected layers.0.mlp.up_proj.bias" in said(bias=torch.ones(128))
    norm = torch.ones(64)
    norm[3] = torch.nan
    spoilt = {**tensors, "model.norm.weight": norm}
    save_file(spoilt, tmp_path / "model.safetensors")
    with pytest.raises(lz.FileError, match=r"1 of 64 values of norm\.weight are NaN or infinite"):
        load_quantized(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(20))
    with pytest.raises(lz.CorruptError):
        load_quantized(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(lz.FileError, match="reading pickle can run code"):
        load_quantized(tmp_path)
