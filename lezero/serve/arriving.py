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
    sizes, tied = source.sizes, source.model.config.tied
    blocks, largest = defaultdict[str, dict[str, int]](dict), 0
    stay, read, made, largest_end = 0.0, 0, [0.0], 0
    for name, parameter in source.model.named_parameters():
        numel, inside = parameter.numel(), name.startswith("layers.")
        kept = numel * _bytes_kept(parameter.dim(), bits, inside)
        if inside:
            _, index, *_, module, _ = name.split(".")
            blocks[index][module] = blocks[index].get(module, 0) + sizes[name]
            largest = max(largest, numel)
        else:
            read, largest_end = read + sizes[name], max(largest_end, numel)
            looked_up = bits == 16 and name == EMBEDDING and not tied
            kept = sizes[name] if looked_up else kept  # as it was read
            made += [] if looked_up else [kept]
        stay += kept
    codes = largest if bits < 16 else 0
    joined = max(sum(x.get(one, 0) for one in ones) for x in blocks.values() for ones in _JOINED)
    block = max(sum(each.values()) for each in blocks.values())
    next_to_block = max(codes or joined, source.beside * largest)
    ends = read + max(sum(made) + (max(made) if codes else 0), source.beside * largest_end)
    return int(max(ends, stay + max(*made, block + next_to_block)))


def _bytes_kept(dims: int, bits: int, inside: bool) -> float:
    """Of a number in a block, or beside them."""
    if dims < 2:
        return 4.0
    if bits == 16 or not inside:  # the vocabulary has 8 bits at least
        return max(bits, 8) / 8
    return bits / 8 * (1 + 1 / 16)  # scales and zero points


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
