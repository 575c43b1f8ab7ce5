"""Folders that transformers' `save_pretrained` writes of quantized models."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.core.errors import FileError, OrderError
from lezero.models import Transformer, TransformerConfig, load_hf, save_hf

transformers = pytest.importorskip("transformers")


def config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip


def llama(given: Any = None) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(given or config()).eval()


def opened(folder: Path) -> nn.Module:
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def refused(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="quantization config"):
        opened(folder)


@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Int4Weight(group=32), lz.Nf4(group=32)])
def test_what_from_pretrained_would_fill_at_random_is_refused(
    scheme: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = lz.quantize_(llama(), scheme, objective="size")
    with caplog.at_level(logging.WARNING):
        refused(model, tmp_path / "a")
    assert "lz.save_quantized(model, folder) writes one that lz.load_quantized opens" in caplog.text
    assert not hasattr(model.config, "quantization_config")
    kept = transformers.PretrainedConfig.from_json_file(tmp_path / "a" / "config.json")
    assert kept.quantization_config["quantized_by"] == "lz.quantize_"  # as its Trainer reads it
    again = lz.quantize_(llama(), scheme, objective="size")
    from safetensors.torch import load_file

    again.load_state_dict(load_file(tmp_path / "a" / "model.safetensors"))
    tokens = torch.arange(8)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    lz.dequantize_(model).save_pretrained(tmp_path / "b")
    assert torch.equal(opened(tmp_path / "b")(tokens).logits, model(tokens).logits)


def test_wherever_the_quantized_layers_are(tmp_path: Path) -> None:
    part = llama()
    lz.quantize_(part.model.layers[0].mlp, lz.Int8Weight(), objective="size")
    refused(part, tmp_path / "a")
    refused(copy.deepcopy(part), tmp_path / "b")
    refused(pickle.loads(pickle.dumps(part)), tmp_path / "c")


_UNPICKLED = """
import lezero.compress.quantize, sys, torch, pathlib
model = torch.load(sys.argv[1], weights_only=False)
model.save_pretrained(sys.argv[2])
"""


def test_models_that_are_unpickled_in_another_process(tmp_path: Path) -> None:
    model = lz.quantize_(llama(), lz.Int8Weight(), objective="size")
    torch.save(model, tmp_path / "model.pt")
    words = [sys.executable, "-c", _UNPICKLED, tmp_path / "model.pt", tmp_path / "a"]
    subprocess.run(words, check=True, capture_output=True)
    with pytest.raises(ValueError, match="quantization config"):
        opened(tmp_path / "a")


def test_other_models_are_saved_as_before(tmp_path: Path) -> None:
    """One with the same config object, and one whose adapters alone are saved, included."""
    shared = config()
    first, second = llama(shared), llama(shared)
    lz.quantize_(first, lz.Int8Weight(), objective="size")
    refused(first, tmp_path / "a")
    second.save_pretrained(tmp_path / "b")
    tokens = torch.arange(8)[None]
    assert torch.equal(opened(tmp_path / "b")(tokens).logits, second(tokens).logits)
    shared.quantization_config = {"quant_method": "another"}
    refused(first, tmp_path / "c")
    assert shared.quantization_config == {"quant_method": "another"}
    second.save_pretrained(tmp_path / "d")
    written = json.loads((tmp_path / "d" / "config.json").read_text())
    assert written["quantization_config"] == {"quant_method": "another"}


def test_a_quantized_model_of_our_own_is_not_saved_without_its_weights(tmp_path: Path) -> None:
    """As it might be over its float ones."""
    shape = {"vocab": 96, "dim": 64, "layers": 1, "heads": 2, "ffn": 64, "context": 64}
    save_hf(Transformer(TransformerConfig(**shape)), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = lz.quantize_(load_hf(tmp_path), lz.Int8Weight(), objective="size")
    with pytest.raises(OrderError, match=r"weight\.packed is no parameter.*lz\.save_quantized"):
        save_hf(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    save_hf(lz.dequantize_(model), tmp_path)
    tokens = torch.arange(8)[None]
    assert torch.equal(load_hf(tmp_path)(tokens), model(tokens))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"quantized_by": "lz.quantize_"}, "save_pretrained.*lz.save_quantized"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors layout.*not read"),
    ],
)
def test_folders_that_nothing_opens_say_so_wherever_they_are_given(
    entry: dict[str, str], why: str, tmp_path: Path
) -> None:
    written = {**config().to_dict(), "quantization_config": entry}
    (tmp_path / "config.json").write_text(json.dumps(written))
    for opens in (lz.models.load_hf, lz.load_quantized):
        with pytest.raises(FileError, match=why):
            opens(tmp_path)


@pytest.mark.parametrize("method", ["lezero", "gptq", "another"])
def test_a_model_that_is_plain_again_is_saved_as_one(method: str, tmp_path: Path) -> None:
    """Its config says how the folder was quantized that it was built for."""
    given = config()
    model = lz.quantize_(llama(given), lz.Int8Weight(), objective="size")
    given.quantization_config = {"quant_method": method}
    lz.dequantize_(model)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization_config" in written) == (method == "another")
    if method != "another":
        tokens = torch.arange(8)[None]
        assert torch.equal(opened(tmp_path)(tokens).logits, model(tokens).logits)
