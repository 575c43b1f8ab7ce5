"""Folders in which AutoGPTQ and AutoAWQ described the model in a file of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lezero as lz
from lezero.compress.quantize import foreign, is_quantized_folder, load_quantized
from lezero.compress.quantize.modules import quantized_layers
from tests.compress.test_imported import FORMS, GPTQ, GROUP, folder


def test_the_older_layout_of_autoawq(tmp_path: Path) -> None:
    wanted = folder(tmp_path, FORMS["awq"])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not is_quantized_folder(tmp_path)
    form = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(form))
    assert is_quantized_folder(tmp_path)
    found = load_quantized(tmp_path)
    weight = quantized_layers(found)["layers.0.mlp.up_proj"].weight.decode(torch.float32)
    assert torch.equal(weight, wanted.layers[0].mlp.up_proj.weight)


def test_the_older_layout_of_autogptq(tmp_path: Path) -> None:
    wanted = folder(tmp_path, GPTQ)
    config = json.loads((tmp_path / "config.json").read_text())
    form = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not is_quantized_folder(tmp_path)
    with pytest.raises(lz.FileError, match=r"nor a quantize_config\.json"):
        load_quantized(tmp_path)
    beside = tmp_path / "quantize_config.json"
    beside.write_text(json.dumps({key: form[key] for key in ("bits", "desc_act", "sym")}))
    with pytest.raises(lz.FileError, match=r"qzeros is .* should be \(1, .* group_size -1"):
        load_quantized(tmp_path)
    beside.write_text(json.dumps({**form, "quant_method": None, "bits": 3}))
    with pytest.raises(lz.FileError, match=r"quantize_config\.json: gptq with bits 3"):
        load_quantized(tmp_path)
    beside.write_text(json.dumps({**form, "quant_method": None}))
    whole = (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-32g.safetensors")
    assert is_quantized_folder(tmp_path)
    found = load_quantized(tmp_path)
    weight = quantized_layers(found)["layers.0.mlp.up_proj"].weight.decode(torch.float32)
    assert torch.equal(weight, wanted.layers[0].mlp.up_proj.weight)
    (tmp_path / "adapter.safetensors").write_bytes(b"")
    with pytest.raises(lz.FileError, match=r"adapter\.safetensors, gptq_model-4bit-32g\.safet"):
        load_quantized(tmp_path)
    (tmp_path / "adapter.safetensors").unlink()
    whole.rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(lz.FileError, match=r"not one whole file \(model-00001-of-00002"):
        load_quantized(tmp_path)


def test_a_group_larger_than_any_number_is_one_of_all_inputs() -> None:
    order = foreign._order(torch.zeros(64, dtype=torch.int32), 64, 32 * 10**19)
    assert order is None
    with pytest.raises(ValueError, match=r"g_idx\[1\] is 1, it should be 0 to 0"):
        foreign._order(torch.arange(64, dtype=torch.int32), 64, 32 * 10**19)


def test_a_model_that_refuses_the_values_is_as_it_was(tmp_path: Path) -> None:
    model = folder(tmp_path, GPTQ)
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def refuse(*_: object) -> None:
        raise ValueError("not these values")

    model.norm.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(lz.FileError, match="does not fit the model: not these values"):
        load_quantized(tmp_path, model)
    assert not quantized_layers(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
