"""A fused program of a model that is read block by block, each quantized and packed as it comes:
what is in memory at once is what stays, and one block as it lies in the file."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from lezero.compress.quantize import Scheme, is_quantized_folder
from lezero.compress.quantize.arriving import quantize_arriving_
from lezero.models import Transformer
from lezero.models.arriving import Arriving, arriving_gguf, arriving_hf
from lezero.models.huggingface import EMBEDDING

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that become one."""


def arriving(place: Path, matrices: torch.dtype | None) -> AbstractContextManager[Arriving] | None:
    """What `place` holds, where it can be read in parts: a Hugging Face folder that is not
    quantized, or a GGUF file, whose dequantized matrices become `matrices`."""
    if place.is_file():
        return arriving_gguf(place, matrices)
    if not (place / "config.json").is_file() or is_quantized_folder(place):
        return None
    return nullcontext(arriving_hf(place))


def room_for(source: Arriving, bits: int) -> int:
    """Bytes that are in memory at most while matrices are read and kept in so many bits.

    First the vocabulary's matrices as they are read, and what becomes of them; at the end all that
    stays and a block as it is read, or the head on its way to huge pages. Beside them lies what is
    made next: codes, a byte each, before they are packed; in 16 bits matrices that are joined.
    """
    sizes, stay, kept_ends = source.sizes, 0.0, dict[str, float]()
    blocks, ends = defaultdict[str, dict[str, int]](dict), 0
    for name, parameter in source.model.named_parameters():
        inside = name.startswith("layers.")
        if parameter.dim() < 2:
            each = 32.0
        elif bits == 16 or not inside:
            each = max(bits, 8)
        else:
            each = bits * (1 + 1 / 16)  # scales and zero points
        kept = each / 8 * parameter.numel()
        if inside:
            _, index, *_, module, _ = name.split(".")
            blocks[index][module] = blocks[index].get(module, 0) + sizes[name]
        else:
            ends += sizes[name]
            if bits == 16 and name == EMBEDDING and not source.model.config.tied:
                stay += sizes[name]  # is looked up as it was read
                continue
            kept_ends[name] = kept
        stay += kept
    first = ends + sum(kept_ends.values()) + (max(kept_ends.values()) if bits < 16 else 0)
    largest = {"layers": 0, "ends": 0}
    for name, parameter in source.model.named_parameters():
        where = "layers" if name.startswith("layers.") else "ends"
        largest[where] = max(largest[where], parameter.numel())
    first = max(first, ends + source.beside * largest["ends"])
    codes = largest["layers"]
    joined = max(sum(x.get(one, 0) for one in ones) for x in blocks.values() for ones in _JOINED)
    block = max(sum(block.values()) for block in blocks.values())
    made = max(joined if bits == 16 else codes, source.beside * codes)
    return int(max(first, stay + max(*kept_ends.values(), block + made)))


class Fetch:
    """Brings blocks, or all beside them (None), quantized by `scheme` where there is one."""

    def __init__(self, source: Arriving, scheme: Scheme | None) -> None:
        self._source, self._scheme = source, scheme

    def __call__(self, index: int | None) -> None:
        model = self._source.model
        part = _ends(model) if index is None else _block(model, index)
        self._source.fill_(part)
        if self._scheme is not None:
            quantize_arriving_(part, self._scheme)


def _ends(model: Transformer) -> nn.Module:
    """What lies beside the blocks, under its names in the model."""
    part = nn.Module()
    for name, module in model.named_children():
        if name != "layers":
            part.add_module(name, module)
    return part


def _block(model: Transformer, index: int) -> nn.Module:
    part = nn.Module()
    part.layers = nn.ModuleDict({str(index): model.layers[index]})
    return part
