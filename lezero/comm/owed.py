"""What candidate codecs would owe of a run's own gradients: the error that each keeps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lezero.comm.codec import codec

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = ("int8:256", "int4:64", "2:4-int4:256", "sign:256", "topk:0.01")
_SAMPLE = 1 << 14  # elements of each buffer that are encoded to see the error; five errors stay
_PIECE = 1 << 10  # of which so many lie together, since codecs work in blocks


class Errors:
    """What each candidate owes after encoding a run's own gradients, over the last gradient."""

    def __init__(self) -> None:
        self._codecs = {name: codec(name) for name in CANDIDATES}
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._norms: dict[str, float] = {}

    def note(self, key: str, flat: Tensor) -> None:
        part = _sample(flat)
        norm = float(part.double().square().sum())
        if not math.isfinite(norm):
            return
        self._norms[key] = norm
        for name, one in self._codecs.items():
            error = self._kept.get((name, key))
            if error is None or error.numel() != part.numel():
                error = self._kept[name, key] = torch.zeros_like(part)
            size = one.bytes(part.numel())
            one.encode(part, torch.empty(size, dtype=torch.uint8, device="cpu"), error)

    def found(self) -> dict[str, list[float]]:
        """For each candidate the squares of what is owed, and of the gradients."""
        total = sum(self._norms.values())
        owed = dict.fromkeys(CANDIDATES, 0.0)
        for (name, _), error in self._kept.items():
            owed[name] += float(error.double().square().sum())
        return {name: [square, total] for name, square in owed.items()}


def _sample(flat: Tensor) -> Tensor:
    """Up to `_SAMPLE` elements of `flat`, spread over all of it, in fp32 on the CPU."""
    if flat.numel() > _SAMPLE:
        pieces = _SAMPLE // _PIECE
        apart = (flat.numel() - _PIECE) // (pieces - 1)
        flat = flat.unfold(0, _PIECE, apart)[:pieces].flatten()
    return flat.float().cpu()


def ratio(squares: list[list[float]]) -> float | None:
    """The error of the ranks' gradients together; None where all were zero or not finite."""
    owed, total = sum(one[0] for one in squares), sum(one[1] for one in squares)
    return (owed / total) ** 0.5 if total else None
