"""topk: the largest part of the values with their places; all others become 0.

`topk:f` keeps k = ⌈f · n⌉ of n values, the largest in magnitude, of equal ones the first. The
payload is k values (fp32) and k places (int32, rising): 64 · f bits an element. What is kept is
exact; what is dropped is no larger than the smallest that is kept.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from lezero.comm.cast_codec import typed
from lezero.comm.codec import ERRORS, Codec, check_flat, codecs
from lezero.core.errors import ConfigError

_SAMPLED = 64  # one of so many values is looked at to find the threshold
_PIECE = 1 << 17  # values compared with it at once: they stay in cache
_MAGNITUDE = 0x7FFFFFFF
_HUGE = 3.38e38  # above it bf16 may round to infinity


@codecs.register("topk")
class TopkCodec(Codec):
    """Values and places of the largest `fraction`."""

    unbiased = False

    def __init__(self, fraction: str) -> None:
        self.name = f"topk:{fraction}"
        self._fraction = Fraction(fraction)  # exact: a float would keep 8 of 100 at 0.07

    @classmethod
    def parse(cls, name: str, option: str) -> TopkCodec:
        try:
            found = float(option)
        except ValueError:
            found = math.nan
        if not 0 < found <= 1:
            raise ConfigError(
                f"codec '{name}:{option}': after the colon stands the fraction that is kept, above "
                "0 and at most 1, as in 'topk:0.01'"
            )
        return cls(option.strip())

    def kept(self, numel: int) -> int:
        """How many of `numel` values are sent."""
        return math.ceil(self._fraction * numel)

    def bytes(self, numel: int) -> int:
        return 8 * self.kept(numel)

    def encode(self, values: Tensor, payload: Tensor, error: Tensor | None = None) -> None:
        check_flat("values", values)
        numel = values.numel()
        check_flat("payload", payload, self.bytes(numel), (torch.uint8,))
        if numel >= 2**31:
            raise ConfigError(f"codec {self.name}: {numel} values in one tensor; allowed are 2³¹-1")
        total = values.float()
        if error is not None:
            check_flat("error", error, numel, ERRORS)
            total = total + error.float()
        if not numel:
            return
        places = largest(total, self.kept(numel))
        sent = total[places]
        parts = (sent, places.to(torch.int32))
        payload.copy_(torch.cat([part.view(torch.uint8) for part in parts]))
        if error is not None:
            total[places] = torch.where(sent.isfinite(), 0.0, error[places].float())
            if not sent.abs().min() < _HUGE:  # more of them may have stayed behind
                total = torch.where(total.to(error.dtype).isfinite(), total, error.float())
            error.copy_(total)

    def decode(self, payload: Tensor, out: Tensor, add: bool = False) -> None:
        check_flat("out", out)
        check_flat("payload", payload, self.bytes(out.numel()), (torch.uint8,))
        k = self.kept(out.numel())
        values, places = typed(payload, torch.float32)[:k], typed(payload, torch.int32)[k:].long()
        if not add:
            out.zero_()
        out[places] = (out[places].float() + values).to(out.dtype)

    def check(self, payload: Tensor, numel: int) -> None:
        super().check(payload, numel)
        places = typed(payload, torch.int32)[self.kept(numel) :].long()
        edges = torch.tensor([-1, numel], device=places.device)
        if not bool((torch.cat([edges[:1], places, edges[1:]]).diff() > 0).all()):
            raise ConfigError(
                f"payload: not one of {self.name}: its places do not rise from 0 to {numel - 1}; "
                "it is damaged, or of another codec"
            )

    def bound(self, values: Tensor) -> Tensor:
        if not len(values):
            return values.double()
        size = values.double().abs()
        bound = size.clone()
        bound[largest(values.float(), self.kept(len(values)))] = 0.0
        return bound


def largest(values: Tensor, k: int) -> Tensor:
    """Places of the `k` largest magnitudes, rising; of equal ones the first. NaN is the largest.

    torch.topk takes any of equal ones, another on each device; ranks must agree.
    """
    places = _at_least_so_many(values, k)
    size = _size(values[places])
    least = size.kthvalue(size.numel() - k + 1).values
    above, equal = places[size > least], places[size == least]
    return torch.cat([above, equal[: k - above.numel()]]).sort().values


def _at_least_so_many(values: Tensor, k: int) -> Tensor:
    """Places that hold the `k` largest and not many more, by a threshold from a sample.

    Selecting among all of them takes ten times as long.
    """
    sample = _size(values[::_SAMPLED].contiguous())
    wanted = 2 * (k // _SAMPLED) + 16
    if wanted < sample.numel():
        least = sample.kthvalue(sample.numel() - wanted + 1).values
        length = _PIECE if values.device.type == "cpu" else len(values)
        found, scratch = [], torch.empty(length, dtype=torch.int32, device=values.device)
        for number, piece in enumerate(values.split(length)):
            size = torch.bitwise_and(piece.view(torch.int32), _MAGNITUDE, out=scratch[: len(piece)])
            found.append((size >= least).nonzero()[:, 0] + number * length)
        places = torch.cat(found)
        if places.numel() >= k:
            return places
    return torch.arange(len(values), device=values.device)


def _size(values: Tensor) -> Tensor:
    """Magnitudes as integers of the same order; NaN is the largest."""
    return values.view(torch.int32) & _MAGNITUDE
