"""What an engine may be asked for, checked before a model is opened or a machine is measured."""

from __future__ import annotations

import os
from typing import Literal, get_args

from torch import nn

from lezero.compress.quantize.modules import quantized_layers
from lezero.core.errors import ConfigError
from lezero.models import Transformer

Weights = Literal["auto", "fp32", "bf16", "int8", "int4"]
KV = Literal["auto", "bf16", "int8"]
Speculate = Literal["off", "lookup", "draft"]


def check_options(
    model: object, weights: str, kv: str, speculate: str, draft: object, **numbers: object
) -> None:
    """Raises `ConfigError` for what is neither a place nor a `Transformer`, for a word or a number
    (None: not given) that is not allowed, and for a way to guess that lacks a model of its own."""
    _check_models(speculate, draft, model)
    _check_word("weights", weights, get_args(Weights))
    _check_word("kv", kv, get_args(KV))
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}: got {value!r}, allowed is a whole number")
        if value < 1:
            raise ConfigError(f"{name}: got {value}, allowed is 1 or more")


def _check_word(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ConfigError(f"{name}: got {given!r}, allowed are {', '.join(allowed)}")


def _check_models(speculate: str, draft: object, model: object) -> None:
    _check_kind("model", model)
    if draft is not None:
        _check_kind("draft", draft)
    _check_word("speculate", speculate, get_args(Speculate))
    if speculate == "draft" and draft is None:
        raise ConfigError("draft: got none for speculate 'draft'; give a smaller model")
    if speculate != "draft" and draft is not None:
        raise ConfigError(
            f"draft: got a model for speculate {speculate!r}; it is for speculate 'draft' only"
        )
    if draft is model and isinstance(draft, Transformer):
        raise ConfigError("draft: got the model itself, which is used up; give a smaller one")


def _check_kind(name: str, given: object) -> None:
    if isinstance(given, str | os.PathLike | Transformer):
        return
    remedy = ""
    if hasattr(given, "save_pretrained"):
        remedy = "; save it and its tokenizer with save_pretrained, and give the folder"
        if isinstance(given, nn.Module) and quantized_layers(given):
            remedy = (
                "; quantized models of other code are not served: call lz.dequantize_(model), save "
                "it and its tokenizer with save_pretrained, and give the folder"
            )
    raise ConfigError(
        f"{name}: got {type(given).__name__}, allowed are a run, a Hugging Face folder, a .gguf "
        f"file, or a Transformer of lezero.models{remedy}"
    )
