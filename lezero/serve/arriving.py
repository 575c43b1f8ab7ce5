"""A model that is read block by block, each brought to where it runs and made small as it comes:
what is in memory at once is what stays, and one block as it lies in the file."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from lezero.compress.quantize import Int4Weight, Scheme, is_quantized_folder
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


def room_for(source: Arriving, bits: int, scheme: Scheme | None) -> int:
    """Bytes that are in memory at most while a `FusedProgram` takes the matrices as they are read,
    and keeps them in so many bits, rounded by `scheme`.

    First the vocabulary's matrices as they are read, and what becomes of them; at the end all that
    stays and a block as it is read, or the head on its way to huge pages. Beside them lies what is
    made next: codes, a byte each, before they are packed; in 16 bits matrices that are joined.
    """
    sizes, tied = source.sizes, source.model.config.tied
    blocks, largest = defaultdict[str, dict[str, int]](dict), 0
    stay, read, made, largest_end = 0.0, 0, [0.0], 0
    for name, parameter in source.model.named_parameters():
        numel, inside = parameter.numel(), name.startswith("layers.")
        kept = _bytes_kept(parameter, bits, inside, scheme)
        if inside:
            _, index, *_, module, _ = name.split(".")
            blocks[index][module] = blocks[index].get(module, 0) + sizes[name]
            largest = max(largest, numel)
        else:
            read, largest_end = read + sizes[name], max(largest_end, numel)
            looked_up = bits == 16 and name == EMBEDDING and not tied
            made += [] if looked_up and sizes[name] == kept else [kept]  # it stays as it was read
        stay += kept
    codes = largest if bits < 16 else 0
    joined = max(sum(x.get(one, 0) for one in ones) for x in blocks.values() for ones in _JOINED)
    block = max(sum(each.values()) for each in blocks.values())
    next_to_block = max(codes or joined, source.beside * largest)
    ends = read + max(sum(made) + (max(made) if codes else 0), source.beside * largest_end)
    return int(max(ends, stay + max(*made, block + next_to_block)))


def room_on(source: Arriving, bits: int, scheme: Scheme | None, dtype: torch.dtype | None) -> int:
    """Bytes that are at least needed where the model will run in modules of its own, while matrices
    come there (as `dtype`; None: as they are in the files) and are kept in so many bits.

    Codes are made beside the whole part, and are packed twice: in panels, then in the order of the
    place's kernels. Of matrices that become one for such kernels, in 16 bits or fewer, the parts
    stay meanwhile.
    """
    come, stay, beside = (defaultdict[str, float](float) for _ in range(3))
    joins = [defaultdict[str, float](float) for _ in _JOINED]
    for name, parameter in source.model.named_parameters():
        numel, inside = parameter.numel(), name.startswith("layers.")
        part, module = (name.split(".")[1], name.split(".")[-2]) if inside else ("", "")
        kept = _bytes_kept(parameter, bits, inside, scheme)
        come[part] += numel * dtype.itemsize if dtype is not None else source.sizes[name]
        stay[part] += kept
        if bits < 16:
            beside[part] = max(beside[part], numel + 2 * kept)
        for join, modules in zip(joins, _JOINED, strict=True):
            join[part] += kept if module in modules else 0.0
    blocks = [part for part in come if part]
    last = max(come[part] + beside[part] - stay[part] for part in blocks)
    joined = max(max(join.values()) for join in joins) if bits <= 16 else 0.0
    return int(max(come[""] + beside[""], sum(stay.values()) + max(last, joined)))


def _bytes_kept(weight: Tensor, bits: int, inside: bool, scheme: Scheme | None) -> float:
    """Of a parameter of a block, or beside them."""
    numel = weight.numel()
    if weight.dim() < 2:
        return 4.0 * numel
    if bits >= 16:
        return numel * bits / 8
    if bits == 8 or not inside:  # the vocabulary has 8 bits at least
        return numel + 4.0 * weight.shape[0]
    assert isinstance(scheme, Int4Weight)
    assert isinstance(scheme.group, int)
    return numel / 2 + 4.0 * numel / scheme.group  # a scale and a zero point in fp16


class Fetch:
    """Brings blocks, or all beside them (None), to `place`, as `dtype` where it is given, quantized
    by `scheme` where there is one."""

    def __init__(
        self,
        source: Arriving,
        scheme: Scheme | None,
        place: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._source, self._scheme = source, scheme
        self._place, self._dtype = place, dtype

    def __call__(self, index: int | None) -> None:
        model = self._source.model
        part = _ends(model) if index is None else _block(model, index)
        self._source.fill_(part)
        part.to(self._place, self._dtype)
        if self._scheme is not None:
            quantize_arriving_(part, self._scheme)

    def whole(self) -> Transformer:
        """The model with all of its parts."""
        model = self._source.model
        for index in (None, *range(len(model.layers))):
            self(index)
        return model


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
