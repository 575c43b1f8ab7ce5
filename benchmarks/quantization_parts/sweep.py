"""`objective="speed"` on many architectures: what it keeps is never slower than before.

The ratio is the median over pairs of calls; where nothing was quantized it is 1 and said so. Beside
it the relative error of the outputs on the batch that calibrated the model.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIDES = {"lezero": ""}
_IDS = {"input_ids": (4, 128)}
_PIXELS = {"pixel_values": (2, 3, 224, 224)}
QUICK = ("BERT",)
_SECONDS, _QUICK_SECONDS = 8.0, 0.5
_FEWEST = 15


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
    """Of each architecture: time / before, and how many of its layers were quantized."""
    table = _architectures()
    found = {name: _measured(*table[name], quick) for name in (QUICK if quick else table)}
    return {"models": found}


def _measured(
    build: Callable[[], Any], shapes: dict[str, tuple[int, ...]], quick: bool
) -> dict[str, Any]:
    """`ratio` with its 95% interval; 1 without an interval where every layer stayed as it was.
    `error`: of the outputs."""
    import lezero as lz
    from lezero.compress.quantize.modules import quantized_layers

    torch.manual_seed(0)
    model = build().eval()
    batch = {key: _input(key, shape) for key, shape in shapes.items()}
    before = copy.deepcopy(model)
    lz.quantize_(model, lz.Int8WeightActivation(), data=[batch], objective="speed")
    report = lz.quantization_report(model)
    done, of = len(quantized_layers(model)), len(report.layers)
    if not done:
        return {"ratio": 1.0, "interval": None, "layers": 0, "of": of, "error": 0.0}
    ratios = _ratios(before, model, batch, _QUICK_SECONDS if quick else _SECONDS)
    low, high = _interval(ratios)
    ratio = statistics.median(ratios)
    error = report.quality_after
    return {"ratio": ratio, "interval": [low, high], "layers": done, "of": of, "error": error}


def _input(key: str, shape: tuple[int, ...]) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    if key.endswith("ids"):
        return torch.randint(0, 8192, shape, generator=drawn)
    return torch.randn(shape, generator=drawn)


@torch.no_grad()
def _ratios(
    before: nn.Module, after: nn.Module, batch: dict[str, Tensor], seconds: float
) -> list[float]:
    """after / before of pairs of calls, one right after the other and in changing order."""
    for model in (before, after):
        model(**batch)
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < _FEWEST or time.perf_counter() - began < seconds:
        times = [0.0, 0.0]
        for index in (0, 1) if len(found) % 2 else (1, 0):
            start = time.perf_counter()
            (before, after)[index](**batch)
            times[index] = time.perf_counter() - start
        found.append(times[1] / times[0])
    return found


def _interval(values: list[float]) -> tuple[float, float]:
    """Of the median, 95%, whatever the distribution: the order statistics that a fair coin's
    number of heads lies between."""
    ordered, n = sorted(values), len(values)
    tail, cut = 0.5**n, 0
    while tail + math.comb(n, cut + 1) * 0.5**n <= 0.025:
        cut += 1
        tail += math.comb(n, cut) * 0.5**n
    return ordered[cut], ordered[n - 1 - cut]
