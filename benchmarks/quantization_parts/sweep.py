"""`objective="speed"` on many architectures: what it keeps is never slower than before."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIDES = {"lezero": ""}
_IDS = {"input_ids": (4, 128)}
_PIXELS = {"pixel_values": (2, 3, 224, 224)}
_ROUNDS = 9


def _architectures() -> dict[str, tuple[Callable[[], Any], dict[str, tuple[int, ...]]]]:
    """Name → what builds it with random weights, and the shapes of one batch."""
    import transformers as tf

    wide = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    inner = {"intermediate_size": 2048, "vocab_size": 8192}
    gpt2 = {"n_embd": 512, "n_layer": 2, "n_head": 8, "vocab_size": 8192}
    t5 = {"d_model": 512, "d_ff": 2048, "num_layers": 2, "num_heads": 8, "vocab_size": 8192}
    distil = {"dim": 512, "n_layers": 2, "n_heads": 8, "hidden_dim": 2048, "vocab_size": 8192}
    whisper = {"d_model": 384, "encoder_layers": 2, "encoder_attention_heads": 6}
    ids2 = {**_IDS, "decoder_input_ids": (4, 32)}
    return {
        "Llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**wide, **inner)), _IDS),
        "GPT-2": (lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**gpt2)), _IDS),
        "BERT": (lambda: tf.BertModel(tf.BertConfig(**wide, **inner)), _IDS),
        "DistilBERT": (lambda: tf.DistilBertModel(tf.DistilBertConfig(**distil)), _IDS),
        "T5": (lambda: tf.T5Model(tf.T5Config(**t5)), ids2),
        "ViT": (lambda: tf.ViTModel(tf.ViTConfig(**wide, intermediate_size=2048)), _PIXELS),
        "Whisper encoder": (lambda: _whisper(tf, whisper), {"input_features": (1, 80, 3000)}),
        "ConvNeXt": (lambda: tf.ConvNextModel(tf.ConvNextConfig()), _PIXELS),
        "ResNet": (lambda: tf.ResNetModel(tf.ResNetConfig(depths=[1, 1, 1, 1])), _PIXELS),
        "MobileNetV2": (lambda: tf.MobileNetV2Model(tf.MobileNetV2Config()), _PIXELS),
    }


def _whisper(tf: Any, shape: dict[str, int]) -> Any:
    config = tf.WhisperConfig(**shape, encoder_ffn_dim=1536, decoder_layers=1)
    return tf.WhisperModel(config).encoder


def run(side: str, place: str, quick: bool) -> dict[str, Any]:
    """Time of each model over its time before; 1 where every layer stayed as it was."""
    import lezero as lz
    from lezero.compress.quantize.modules import quantized_layers

    found: dict[str, Any] = {}
    table = _architectures()
    for name in ("BERT",) if quick else table:
        build, shapes = table[name]
        torch.manual_seed(0)
        model = build().eval()
        batch = {key: _input(key, shape) for key, shape in shapes.items()}
        before = copy.deepcopy(model)
        lz.quantize_(model, lz.Int8WeightActivation(), data=[batch], objective="speed")
        count = len(quantized_layers(model))
        ratio = _ratio(before, model, batch, 3 if quick else _ROUNDS) if count else 1.0
        found[name] = {"ratio": ratio, "layers": count}
    worst = max(entry["ratio"] for entry in found.values())
    return {"models": found, "worst": worst, "count": len(found)}


def _input(key: str, shape: tuple[int, ...]) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    if key.endswith("ids"):
        return torch.randint(0, 8192, shape, generator=drawn)
    return torch.randn(shape, generator=drawn)


@torch.no_grad()
def _ratio(before: nn.Module, after: nn.Module, batch: dict[str, Tensor], rounds: int) -> float:
    """Median of `after` over that of `before`, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for index, model in ((0, before), (1, after)) if turn % 2 else ((1, after), (0, before)):
            began = time.perf_counter()
            model(**batch)
            if turn:
                times[index].append(time.perf_counter() - began)
    return statistics.median(times[1]) / statistics.median(times[0])
