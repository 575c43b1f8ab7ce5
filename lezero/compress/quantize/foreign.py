"""Layers of GPTQ and AWQ checkpoints: their bytes to codes, scales and zero points.

Both count w ≈ (q - z) s with unsigned codes q. Letters: N outputs, K inputs, G groups of inputs,
P = 32 / bits codes in one int32, the first in its lowest bits.

GPTQ (AutoGPTQ, GPTQModel; Frantar et al., 2022, arXiv:2210.17323): `qweight` (K / P, N) packs
along the inputs, `qzeros` (G, N / P) along the outputs, and holds z (format "gptq_v2") or z - 1
("gptq", see `_zeros_of_gptq`); `scales` (G, N); `g_idx` (K,) says each input's group, out of order
with `desc_act`.

AWQ (AutoAWQ, version "gemm"; Lin et al., 2023, arXiv:2306.00978): `qweight` (K, N / 8) and `qzeros`
(G, N / 8) pack along the outputs, where the eight of one int32 stand in the order 0 2 4 6 1 3 5 7;
`scales` (G, N).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ConfigDict
from torch import Tensor

from lezero.compress.quantize.sites import not_finite
from lezero.core.config import Config
from lezero.core.errors import FileError
from lezero.ops.quantize import Grid, Quantized

_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of an int32 AWQ keeps output 0, 1, 2, …"""
_SCALES: dict[torch.dtype, Literal["fp32", "fp16", "bf16"]] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
_AGAIN = "copy the files of the model again, or write the checkpoint again"
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class Foreign(Config):
    """What is used of the `quantization_config` in a config.json; other keys are left alone."""

    model_config = ConfigDict(extra="ignore")

    quant_method: Literal["gptq", "awq"]
    bits: int
    group_size: int = -1
    """-1, and where none is given: one group, as in AutoGPTQ."""
    desc_act: bool = False
    version: str = "gemm"
    checkpoint_format: str = "gptq"
    meta: Any = None
    dynamic: dict[str, Any] | None = None

    @property
    def by_gptqmodel(self) -> bool:
        """Whether GPTQModel wrote it: `meta.quantizer` is "name:version", or a list of them."""
        named = self.meta.get("quantizer") if isinstance(self.meta, dict) else None
        return "gptqmodel" in str(named).lower()

    def check(self, where: str) -> None:
        """Raises `FileError` for a layout that is not read."""
        allowed = (4, 8) if self.quant_method == "gptq" else (4,)
        reason = ""
        if self.bits not in allowed:
            reason = f"bits {self.bits}; read are {' and '.join(map(str, allowed))}"
        elif self.group_size != -1 and (self.group_size < 32 or self.group_size % 32):
            reason = f"group_size {self.group_size}; read are -1 and multiples of 32"
        elif self.quant_method == "awq" and self.version.lower() != "gemm":
            reason = f"version {self.version[:20]!r}; read is 'gemm'"
        elif self.quant_method == "gptq" and self.checkpoint_format not in ("gptq", "gptq_v2"):
            reason = f"checkpoint_format {self.checkpoint_format[:20]!r}; read: gptq, gptq_v2"
        elif self.dynamic:
            reason = "dynamic (other settings for some layers), which is not read"
        if reason:
            raise FileError(f"{where}: {self.quant_method} with {reason}")


class Layer(NamedTuple):
    """`made` lies on `grid`; `order`: which input each column of the codes belongs to; `disputed`:
    whether the two rules for zero points of format "gptq" read different ones."""

    made: Quantized
    grid: Grid
    order: Tensor | None
    disputed: bool


def read_layer(tensors: Mapping[str, Tensor], shape: tuple[int, int], about: Foreign) -> Layer:
    """One layer of (N, K). `ValueError` says which tensor does not fit."""
    N, K = shape
    bits, P = about.bits, 32 // about.bits
    group = K if about.group_size == -1 else about.group_size
    G = -(-K // group)
    gptq = about.quant_method == "gptq"
    wanted = {
        "qweight": (-(-K // P), N) if gptq else (K, -(-N // P)),
        "qzeros": (G, -(-N // P)),
        "scales": (G, N),
    }
    for name, size in wanted.items():
        if name not in tensors:
            raise ValueError(f"{name} is missing; {_AGAIN}")
        if tuple(tensors[name].shape) != size:
            raise ValueError(
                f"{name} is {tuple(tensors[name].shape)}, it should be {size} at {bits} bits and "
                f"group_size {about.group_size}; correct these in the quantization_config, or copy "
                "the files of the model again"
            )
        allowed = tuple(_SCALES) if name == "scales" else (torch.int32,)
        if tensors[name].dtype not in allowed:
            raise ValueError(
                f"{name} holds {tensors[name].dtype}, it should hold "
                f"{' or '.join(map(str, allowed))}; write the checkpoint again with that"
            )
    if bad := not_finite(tensors["scales"]):
        raise ValueError(
            f"{bad} of {tensors['scales'].numel()} values of scales are NaN or infinite; {_AGAIN}"
        )
    order, disputed = None, False
    if gptq:
        if about.desc_act and G > 1 and "g_idx" not in tensors:
            raise ValueError(
                "g_idx is missing, and desc_act is true: nothing says which group an input is in; "
                "take the whole checkpoint, or say desc_act false if its inputs are in order"
            )
        order = _order(tensors.get("g_idx"), K, group)
        codes = unpack_int32(tensors["qweight"], bits, 0)[:K].T
        read, disputed = _zeros_of_gptq(tensors["qzeros"], N, about)
    else:
        codes = _awq(tensors["qweight"])[:, :N].T
        read = _awq(tensors["qzeros"])[:, :N]
    if order is not None:
        codes = codes[:, order.long()]
    scale, zeros = tensors["scales"].T.float().contiguous(), read.T.float()
    kept = _SCALES[tensors["scales"].dtype]
    made, grid = _on_grid(codes, scale, zeros, bits, "row" if G == 1 else group, kept)
    return Layer(made, grid, order, disputed)


def _zeros_of_gptq(packed: Tensor, N: int, about: Foreign) -> tuple[Tensor, bool]:
    """Zero points (G, N), and whether the two rules of format "gptq" read different ones.

    AutoGPTQ means each field by itself: z is (field + 1) mod 2^bits; kernels that leave out the mod
    read 2^bits for a z of 0. GPTQModel takes 1 for each z from the whole int32, so that a z of 0, a
    field of ones, borrows from the next, and adding to the int32 undoes it. Nothing but the name of
    the writer tells which it was.
    """
    fields = unpack_int32(packed, about.bits, 1)[:, :N]
    if about.checkpoint_format == "gptq_v2":
        return fields, False
    largest = (1 << about.bits) - 1
    each = (fields + 1) & largest
    borrowed = unpack_int32(packed + ((1 << 32) - 1) // largest, about.bits, 1)[:, :N]  # it wraps
    return borrowed if about.by_gptqmodel else each, not torch.equal(each, borrowed)


def unpack_int32(packed: Tensor, bits: int, dim: int) -> Tensor:
    """uint8 codes of `bits` out of int32, `dim` (0 or 1) longer by 32 / bits; lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    shifts = shifts.view(1, -1, 1) if dim == 0 else shifts
    wide = (packed.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
    return wide.flatten(dim, dim + 1).to(torch.uint8)


def pack_int32(codes: Tensor, bits: int, dim: int) -> Tensor:
    """The inverse; what is left of the last int32 is 0."""
    moved = codes.movedim(dim, -1)
    P = 32 // bits
    padded = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % P)).to(torch.int64)
    shifts = torch.arange(0, 32, bits, dtype=torch.int64, device=codes.device)
    words = (padded.unflatten(-1, (-1, P)) << shifts).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def _awq(packed: Tensor) -> Tensor:
    codes = unpack_int32(packed, 4, 1).unflatten(1, (-1, 8))
    return codes[..., list(_AWQ_PLACE)].flatten(1)


def _order(g_idx: Tensor | None, K: int, group: int) -> Tensor | None:
    """The inputs by group; None when they lie so already."""
    if g_idx is None:
        return None
    # A group of more than there is, as large as a file may say, is one of all.
    in_rows = torch.arange(K, dtype=torch.int64, device=g_idx.device) // min(group, K)
    if tuple(g_idx.shape) != (K,) or g_idx.dtype not in _INTEGERS:
        raise ValueError(
            f"g_idx is {g_idx.dtype} {tuple(g_idx.shape)}, it should be torch.int32 ({K},); write "
            "the checkpoint again with that"
        )
    groups = g_idx.to(torch.int64)
    if torch.equal(groups, in_rows):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], in_rows):
        raise ValueError(f"{_wrong_group(groups, in_rows)}; correct group_size, or {_AGAIN}")
    return order.to(torch.int32)


def _wrong_group(groups: Tensor, wanted: Tensor) -> str:
    """What is the matter with the groups of the inputs, where they are not those wanted in some
    order."""
    most = int(wanted.max())
    outside = ((groups < 0) | (groups > most)).nonzero()
    if len(outside):
        place = int(outside[0])
        return f"g_idx[{place}] is {int(groups[place])}, it should be 0 to {most}"
    sizes, right = torch.bincount(groups, minlength=most + 1), torch.bincount(wanted)
    place = int((sizes != right).nonzero()[0])
    return f"g_idx puts {sizes[place]} inputs in group {place}, it should be {right[place]}"


def _on_grid(
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor,
    bits: int,
    group: int | Literal["row"],
    kept: Literal["fp32", "fp16", "bf16"],
) -> tuple[Quantized, Grid]:
    """Without zero points where all are in the middle: less to read and to add."""
    middle = 1 << (bits - 1)
    symmetric = bool((zeros == middle).all()) and (bits == 4 or bool((codes >= 1).all()))
    name: Literal["int4", "int8"] = "int4" if bits == 4 else "int8"
    grid = Grid(name, group, not symmetric, kept)
    if symmetric and bits == 8:
        codes = (codes.to(torch.int16) - middle).to(torch.int8)
    made = Quantized(codes.contiguous(), scale, None if symmetric else zeros.contiguous())
    return made, grid
