"""Ten architectures of transformers, from their configs: none crashes, outputs stay near."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize.batches import tensors_of
from lezero.compress.quantize.budget import output_difference
from lezero.compress.quantize.modules import quantized_layers

transformers = pytest.importorskip("transformers")
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 4}


def ids() -> dict[str, Any]:
    return {"input_ids": torch.randint(0, 96, (2, 10))}


def pictures() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def make(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**fields))


def whisper() -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=16,
    )
    return WhisperEncoder(config)


GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 32}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 96}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "llama": (
        make("LlamaForCausalLM", "LlamaConfig", **TEXT, **HEADS, num_key_value_heads=2),
        ids,
    ),
    "gpt2": (make("GPT2LMHeadModel", "GPT2Config", **GPT2), ids),
    "bert": (make("BertModel", "BertConfig", **TEXT, **HEADS), ids),
    "distilbert": (
        make(
            *("DistilBertModel", "DistilBertConfig"),
            **{"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 96},
        ),
        ids,
    ),
    "vit": (
        make(
            *("ViTModel", "ViTConfig"),
            **{**TEXT, **HEADS, "image_size": 32, "patch_size": 8, "vocab_size": 2},
        ),
        pictures,
    ),
    "convnext": (
        make(
            *("ConvNextForImageClassification", "ConvNextConfig"),
            **{"hidden_sizes": [32, 64], "depths": [1, 2], "num_stages": 2, "num_labels": 7},
            layer_scale_init_value=0.5,
        ),
        pictures,
    ),
    "resnet": (
        make(
            *("ResNetForImageClassification", "ResNetConfig"),
            **{"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [2, 2]},
            layer_type="basic",
            num_labels=7,
        ),
        pictures,
    ),
    "mobilenet": (
        make(
            *("MobileNetV2ForImageClassification", "MobileNetV2Config"),
            **{"depth_multiplier": 0.35, "image_size": 32, "num_labels": 7},
        ),
        pictures,
    ),
    "whisper": (whisper, lambda: {"input_features": torch.randn(2, 16, 32)}),
    "t5": (
        make("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0),
        lambda: {**ids(), "decoder_input_ids": torch.randint(0, 96, (2, 6))},
    ),
}
SCHEMES = {
    "int8": (lz.Int8Weight(), 0.04),
    "w8a8": (lz.Int8WeightActivation(), 0.15),
    "int4": (lz.Int4Weight(group=32), 0.3),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_quantizes(name):
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model, data = build().eval(), [batch()]
    with torch.no_grad():
        wanted = tensors_of(model(**data[0]))
        for label, (scheme, bound) in SCHEMES.items():
            made = copy.deepcopy(model)
            lz.quantize_(made, scheme, data=data, objective="size")
            assert quantized_layers(made), label
            found = output_difference(wanted, tensors_of(made(**data[0])))
            assert found < bound, (label, found)
            report = lz.quantization_report(made)
            assert report.bytes_after < report.bytes_before
            lz.dequantize_(made)
            made(**data[0])


@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Fp8()], ids=["int8", "fp8"])
def test_layers_that_stay_in_fp32_give_fp32(scheme: Any, tmp_path: Path) -> None:
    """T5 casts to the type of `wo`, fp32 in a model in fp16, only where its weight is a tensor."""
    torch.manual_seed(0)
    build, batch = MODELS["t5"]
    build().save_pretrained(tmp_path)
    kind = transformers.T5ForConditionalGeneration
    model, data = kind.from_pretrained(tmp_path, dtype=torch.float16).eval(), batch()
    last = model.encoder.block[-1].layer[-1]
    kinds = [last.DenseReluDense.wo.weight.dtype]
    last.register_forward_hook(lambda *given: kinds.append(given[-1].dtype))
    with torch.no_grad():
        wanted = model(**data).logits
        lz.quantize_(model, scheme, objective="size")
        found = model(**data).logits
    assert kinds == [torch.float32] * 3
    assert output_difference([wanted.float()], [found.float()]) < 0.1
