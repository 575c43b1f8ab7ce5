"""GGUF files as models of our own layers: what lies there in 4 or 8 bits is never rounded again."""

from __future__ import annotations

import os

import torch
from torch import nn

from lezero.compress.quantize.int8 import Int8Weight
from lezero.compress.quantize.modules import QuantizedEmbedding, QuantizedLinear
from lezero.compress.quantize.sites import kind_of
from lezero.compress.quantize.verb import quantize_
from lezero.compress.quantize.weights import PackedWeight
from lezero.core import ledger
from lezero.models import Transformer, load_gguf
from lezero.models.gguf_blocks import Blocks, shares
from lezero.models.gguf_header import read_gguf_header


def kept_share(path: str | os.PathLike[str], bits: tuple[int, ...]) -> float:
    """Which part of the layers' weights in a GGUF file lies in blocks of so many bits, of types
    that are kept: Q4_0, Q4_1 and Q8_0. Errors as `load_gguf`."""
    found = shares(read_gguf_header(path).tensors)
    return sum(found[width] for width in bits)


def load_gguf_blocks(
    path: str | os.PathLike[str], dtype: torch.dtype | None = None, *, others_int8: bool = False
) -> Transformer:
    """The model in a GGUF file, with its own blocks of 4 and 8 bits as packed weights.

    [Note: zero points of Q4_1] in `models/gguf_blocks.py` says how near they are. dtype: of what
    stays float (fp32 when not given). others_int8: matrices of other types become int8, a scale a
    row. Errors as `load_gguf`, which dequantizes all.
    """
    blocks: dict[str, PackedWeight] = {}

    def keep(name: str, found: Blocks) -> None:
        kept = PackedWeight.of(found.made, found.grid, dtype or torch.float32)
        blocks[name.removesuffix(".weight")] = kept

    model = load_gguf(path, dtype, keep)
    modules = dict(model.named_modules())
    left = [name for name, module in modules.items() if name not in blocks and kind_of(module)]
    if others_int8 and left:
        quantize_(model, Int8Weight(), filter=left, objective="size")
    for name, weight in blocks.items():
        module = modules[name]
        if isinstance(module, nn.Embedding):
            QuantizedEmbedding(module, weight).take_over(module)
        else:
            bias = module._parameters.get("bias")
            QuantizedLinear(module, weight, bias).take_over(module)
    if blocks:
        ledger.record(model, "quantize_")
    return model.eval()
