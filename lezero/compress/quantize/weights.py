"""What stands in the place of a weight: modules that hold codes and scales, and multiply with them.

`PackedWeight` lies as the kernels of `lezero.ops.linear` read it; `CodedWeight` holds codes in the
weight's own shape, for what has no such kernel. It is decoded at each use, unless both the weight
and the tokens are fp8.

[Note: layouts of a packed weight]
Kernels of accelerators read the same codes in another order than those of CPUs (`rows.py` and
`layout.py` in `lezero.ops.linear`), so a packed weight changes its order with its device. Its
`state_dict` is always that of CPUs: a file does not depend on the device, and is read on any.

[Note: a weight is a module]
A quantized layer's `weight` is one of these modules, so the layer's `state_dict` has the keys
`weight.packed` (or `weight.codes`), `weight.scale` and, with zero points, `weight.zero`. Layers
that were tied share the module, and stay tied through `.to()`. Foreign code that reads the weight
as a tensor still works (`stand_in.py`): `dtype`, `device` and `shape` are those of the weight.

Letters: N output features, K input features, G groups.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lezero.compress.quantize.accepted import check_rows, check_type
from lezero.compress.quantize.stand_in import StandIn
from lezero.core.errors import ConfigError
from lezero.ops.linear import (
    Packed,
    embedding_int,
    from_rows,
    in_rows,
    lies_channels_last,
    linear_fp8,
    linear_int,
    pack,
    settled,
    unpack,
)
from lezero.ops.linear.layout import PANEL
from lezero.ops.quantize import (
    Grid,
    Quantized,
    dequantize,
    pack_nibbles,
    unpack_nibbles,
)

_Marks = list[tuple[weakref.ref[Tensor], int]]
_saved: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of weights: marks, and what was made of them
_SCALES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class QuantizedWeight(StandIn):
    """Codes on `grid` for a weight of `shape`; `dtype` is what it decodes to.

    `transposed`: the float layer has the weight as (K, N), transformers' `Conv1D`. So those see it
    who read it as a tensor; codes, `full_shape` and all that kernels read are (N, K).
    """

    scale: Tensor

    def __init__(self, grid: Grid, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.grid, self.full_shape = grid, tuple(shape)
        self.decodes_to = dtype  # no buffer: it would lie on another device than the codes

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.full_shape[::-1] if self.transposed else self.full_shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.decodes_to

    @property
    def device(self) -> torch.device:
        return self.scale.device

    @property
    def nbytes(self) -> int:
        """Bytes that are held; what is saved differs by padding at most."""
        return sum(x.nbytes for x in self._buffers.values() if x is not None)

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight that the codes stand for, of `shape`."""
        found = self.decoded(dtype)
        return found.T.contiguous() if self.transposed else found

    @abstractmethod
    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        """The same, of `full_shape`."""

    def decoded_rows(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        """The weight in fp32, `count` rows or somewhat more at a time where that is possible, with
        which rows they are."""
        yield slice(None), self.decoded(torch.float32)

    @abstractmethod
    def linear(
        self, x: Tensor, bias: Tensor | None, x_bits: int, x_scale: Tensor | None, x_block: int = 0
    ) -> Tensor:
        """x wᵀ + bias in x's dtype, with activations of `x_bits`, see `QuantizedLinear`."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` of the weight: (…, K) in `dtype`."""

    def extra_repr(self) -> str:
        group = self.grid.group
        zero = ", zero points" if self.grid.zero_point else ""
        return f"{self.full_shape}, {self.grid.format}, group={group}{zero}, {self.dtype}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        apply = super()._apply
        keeping_types(self, list(self._buffers), lambda: apply(fn, recurse))
        # The type that it decodes to follows `.to()` as a parameter's would.
        self.decodes_to = fn(torch.empty(0, dtype=self.decodes_to, device="cpu")).dtype
        # Kernels read codes as they were laid out, whatever `.to(memory_format=…)` asks of images.
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else buffer.contiguous()
        return self


class PackedWeight(QuantizedWeight):
    """An (N, K) weight in int8 or int4 as `lezero.ops.linear` reads it."""

    packed: Tensor
    zero: Tensor | None

    def __init__(self, grid: Grid, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Buffers without values; `of` gives them some, and so does `load_state_dict`."""
        assert grid.is_integer
        super().__init__(grid, shape, dtype)
        N, K = self.full_shape
        panels, groups = -(-N // 16), -(-K // self.group) if self.group else 1
        inputs = -(-K // 64) * (8 if grid.bits == 4 else 16)
        scale = torch.empty(panels, groups, 16, dtype=_SCALES[grid.scale_dtype])
        self.register_buffer("packed", torch.empty(panels, inputs, 16, 4, dtype=torch.uint8))
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.empty_like(scale) if grid.zero_point else None)

    @classmethod
    def of(cls, made: Quantized, grid: Grid, dtype: torch.dtype) -> PackedWeight:
        """`made`: what `lezero.ops.quantize.quantize` gave on `grid` for an (N, K) weight."""
        N, scale, zero = len(made.codes), made.scale, made.zero
        if grid.group == "tensor":
            grid, scale = replace(grid, group="row"), scale.expand(N, 1)
            zero = None if zero is None else zero.expand(N, 1)
        kept = _SCALES[grid.scale_dtype]
        with torch.device("meta"):
            weight = cls(grid, made.codes.shape, dtype)
        packed = pack(
            made.codes, scale.to(kept), None if zero is None else zero.to(kept), bits=grid.bits
        )
        weight.packed, weight.scale, weight.zero = packed
        weight._settle()
        return weight

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: all of a row."""
        return self.grid.group if isinstance(self.grid.group, int) else 0

    def parts(self) -> Packed:
        """In the layout of its device."""
        held = self._buffers  # asked by name, each would take as long as all three
        return Packed(held["packed"], held["scale"], held["zero"])  # type: ignore[arg-type]

    def unpacked(self) -> Quantized:
        """Codes (N, K) and scales, zero points (N, G), as they were packed."""
        N, K = self.full_shape
        return Quantized(*unpack(self.parts(), N, K, bits=self.grid.bits, group=self.group))

    def decoded_rows(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        N, K = self.full_shape
        each = 1 if in_rows(self.parts()) else PANEL
        step = -(-count // each)
        grid = self.grid if self.group else replace(self.grid, group="row")
        for first in range(0, -(-N // each), step):
            weight, scale, zero = self.parts()
            own = slice(first, first + step)
            some = Packed(weight[own], scale[own], None if zero is None else zero[own])
            rows = slice(first * each, min(N, (first + step) * each))
            made = unpack(some, rows.stop - rows.start, K, bits=grid.bits, group=self.group)
            yield rows, dequantize(*made, grid)

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        codes, scale, zero = self.unpacked()
        grid = self.grid if self.group else replace(self.grid, group="row")
        return dequantize(codes, scale, zero, grid, dtype or self.dtype)

    def linear(
        self, x: Tensor, bias: Tensor | None, x_bits: int, x_scale: Tensor | None, x_block: int = 0
    ) -> Tensor:
        self.check_inputs(x)
        return linear_int(
            x,
            self.parts(),
            bias,
            out_features=self.full_shape[0],
            bits=self.grid.bits,
            group=self.group,
            x_bits=x_bits,
            x_block=x_block,
            x_scale=x_scale,
            may_round=True,
        )

    def check_inputs(self, x: Tensor) -> None:
        """Raises `ConfigError` where `x` is not (…, K), or of a type that kernels do not take."""
        N, K = self.full_shape
        check_type(x, self.grid.format)
        if x.shape[-1:] != (K,):  # the kernel would take fewer: weights are padded
            raise ConfigError(f"input: got {tuple(x.shape)}, allowed is (…, {K}) for {N} × {K}")

    def rows(self, ids: Tensor) -> Tensor:
        N, K = self.full_shape
        check_rows(self.dtype, self.grid.format)
        return embedding_int(
            *(ids, self.parts()),
            rows=N,
            in_features=K,
            bits=self.grid.bits,
            group=self.group,
            dtype=self.dtype,
        )

    def _sizes(self) -> tuple[int, int, int, int]:
        N, K = self.full_shape
        return N, K, self.grid.bits, self.group

    def _settle(self) -> None:
        """Takes the layout of its device. See [Note: layouts of a packed weight]."""
        self.packed, self.scale, self.zero = settled(self.parts(), *self._sizes())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or one that was pickled and may lie on another device now."""
        super().__setstate__(state)
        self._settle()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        changed = super()._apply(fn, recurse)
        self._settle()
        return changed

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if in_rows(self.parts()):
            for name, x in zip(("packed", "scale", "zero"), self._panels(), strict=False):
                destination[prefix + name] = x

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.packed, self.scale, self.zero = from_rows(self.parts(), *self._sizes())
        super()._load_from_state_dict(*args, **kwargs)
        self._settle()

    def _panels(self) -> list[Tensor]:
        """What is saved. One copy while it is in use, so that tied layers are saved as tied."""
        held = [x for x in self.parts() if x is not None]
        versions = [0 if x.is_inference() else x._version for x in held]
        marks, kept = _saved.get(self, ([], []))
        made = [x for x in (ref() for ref in kept) if x is not None]
        same = [(ref(), version) for ref, version in marks]
        if len(made) == len(held) == len(same) and all(
            x is y and v == w for x, v, (y, w) in zip(held, versions, same, strict=True)
        ):
            return made
        made = [x for x in from_rows(self.parts(), *self._sizes()) if x is not None]
        marks = [(weakref.ref(x), v) for x, v in zip(held, versions, strict=True)]
        _saved[self] = marks, [weakref.ref(x) for x in made]
        return made


class CodedWeight(QuantizedWeight):
    """A weight of any shape as codes; (N, …) counts as (N, K) for scales.

    `codes`: in the weight's shape for formats of 8 bits, (N, ⌈K / 2⌉) bytes for those of 4.
    """

    codes: Tensor
    zero: Tensor | None
    channels_last = False
    """Of a convolution of images: whether its outputs lie so, whatever its inputs do."""

    def __init__(self, grid: Grid, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Buffers without values; `of` gives them some, and so does `load_state_dict`."""
        super().__init__(grid, shape, dtype)
        flat = self._flat()
        of_scale = grid.scale_shape(torch.Size(flat))
        scale = torch.empty(of_scale, dtype=_SCALES[grid.scale_dtype])
        held = (flat[0], -(-flat[1] // 2)) if grid.bits == 4 else self.full_shape
        kind = torch.uint8 if grid.bits == 4 else grid.code_dtype
        self.register_buffer("codes", torch.empty(held, dtype=kind))
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.empty_like(scale) if grid.zero_point else None)

    @classmethod
    def of(
        cls, made: Quantized, grid: Grid, shape: Sequence[int], dtype: torch.dtype
    ) -> CodedWeight:
        """`made`: what `quantize` gave on `grid` for the weight flattened to (N, K)."""
        kept = _SCALES[grid.scale_dtype]
        with torch.device("meta"):
            weight = cls(grid, shape, dtype)
        codes = pack_nibbles(made.codes) if grid.bits == 4 else made.codes.view(weight.full_shape)
        weight.codes, weight.scale = codes.contiguous(), made.scale.to(kept)
        weight.zero = None if made.zero is None else made.zero.to(kept)
        return weight

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        wide = self._wide(self.codes.view(self._stored()), self.scale, self.zero, self._flat()[1])
        return wide.view(self.full_shape).to(dtype or self.dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        if len(self.full_shape) == 4:  # `.to(memory_format=…)` is for outputs
            one = torch.empty(2, 2, 2, 2, dtype=self.dtype, device="cpu")
            last = one.contiguous(memory_format=torch.channels_last)
            self.channels_last = lies_channels_last(fn(last if self.channels_last else one))
        return super()._apply(fn, recurse)

    def linear(
        self, x: Tensor, bias: Tensor | None, x_bits: int, x_scale: Tensor | None, x_block: int = 0
    ) -> Tensor:
        if x_bits == 8:
            check_type(x, self.grid.format)
            return linear_fp8(x, self.codes, self.scale, bias)
        bias = bias if bias is None else bias.to(x.dtype)
        return F.linear(x, self.decoded(x.dtype), bias)

    def rows(self, ids: Tensor) -> Tensor:
        flat = ids.flatten()
        whole = self.grid.group == "tensor"
        codes, scale, zero = (
            None if x is None else x if whole and x is not self.codes else _rows_of(x, flat)
            for x in (self.codes, self.scale, self.zero)
        )
        assert codes is not None
        assert scale is not None
        found = self._wide(codes, scale, zero, self._flat()[1])
        return found.view(*ids.shape, self._flat()[1]).to(self.dtype)

    def _wide(self, codes: Tensor, scale: Tensor, zero: Tensor | None, K: int) -> Tensor:
        if self.grid.bits == 4:
            codes = unpack_nibbles(codes, K)
        return dequantize(codes, scale, zero, self.grid)

    def _flat(self) -> tuple[int, int]:
        N = self.full_shape[0]
        return N, max(1, torch.Size(self.full_shape[1:]).numel())

    def _stored(self) -> tuple[int, int]:
        N, K = self._flat()
        return (N, -(-K // 2)) if self.grid.bits == 4 else (N, K)


def keeping_types(
    module: nn.Module, names: Sequence[str], apply: Callable[[], nn.Module]
) -> nn.Module:
    """`apply` of `.to()`: types of the scales `names` stay, since 16 bits would lose digits."""
    before = {name: module._buffers.get(name) for name in names}
    changed = apply()
    for name, buffer in before.items():
        after = module._buffers.get(name)
        if buffer is None or after is None:
            continue
        if after.dtype != buffer.dtype:
            module._buffers[name] = buffer.to(after.device)
    return changed


def _rows_of(x: Tensor, flat: Tensor) -> Tensor:
    """x[flat], but never from the end: an id below 0 is an error."""
    if x.device.type == "cpu" or x.itemsize > 1:
        return x.index_select(0, flat)
    # Not every accelerator selects float8; bytes it does, but no `torch.jit.trace` takes that view.
    return x.view(torch.uint8).index_select(0, flat).view(x.dtype)
