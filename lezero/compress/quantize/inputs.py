"""What is kept of the inputs of a layer while calibration data goes through it.

Layers that are given the same tensor (query, key and value projections) share one record.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lezero.compress.quantize.autocast import Autocast
from lezero.compress.quantize.observers import Observer, arranged
from lezero.core.errors import NumericsError

_UNSEEN = 1e-3
"""Of the median magnitude: what is below it was as good as never there."""


def as_known(size_K: Tensor, most_w_K: Tensor, power: int = 1) -> Tensor:
    """Magnitudes of channels (or their squares: power 2), with the median of the others for those
    that calibration never met, as those behind a ReLU that stayed 0. most_w_K: the largest weight
    of each; a channel that is small by nature has large ones.

    Of the others nothing is known, but they may come: taken at their word they would be scaled
    against all, or their weights be clipped for nothing.
    """
    share_K = size_K * most_w_K.to(size_K.dtype) ** power
    if not share_K.any():
        return size_K
    middle, least = size_K[share_K > 0].median(), _UNSEEN**power
    unseen_K = (size_K < middle * least) & (share_K < share_K[share_K > 0].median() * least)
    return torch.where(unseen_K, middle, size_K)


class Inputs:
    """Statistics of a layer's inputs, along the channels K (of images: dim 1).

    first: the input of the first batch, whole; `autocast`: under which it came. absmax, mean,
    mean_square, mean_size: per channel, over all batches; mean_size is that of |x|. hessian: Σ x xᵀ
    (K, K), where asked for; a method may use it up, and leave in `factor` what it made of it for
    the layers that share the inputs.
    """

    def __init__(
        self, layer: str, *, image: bool, hessian: bool = False, observer: Observer | None = None
    ) -> None:
        self.layers = [layer]
        self.image = image
        self.first: Tensor | None = None
        self.autocast: Autocast | None = None
        self.count = 0
        self.absmax = self.mean = self.mean_square = self.mean_size = torch.empty(0)
        self._importance: Tensor | None = None
        self.observer = observer
        self._wants_hessian = hessian
        self.hessian: Tensor | None = None
        self.factor: Any = None

    @property
    def importance(self) -> Tensor:
        """What errors of the channels of a weight count for, squares of what comes through them."""
        return self.mean_square if self._importance is None else self._importance

    def weigh(self, w_NK: Tensor) -> None:
        """Before parts of a weight are rounded: with what is known of its channels (`as_known`)."""
        low_K, high_K = w_NK.aminmax(dim=0)  # no copy of a whole vocabulary
        self._importance = as_known(self.mean_square, torch.maximum(-low_K, high_K), 2)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Takes one call's input in, which is not empty. Raises `NumericsError` where it is not
        finite."""
        if not x.is_floating_point():
            self.first = x.detach().clone() if self.first is None else self.first
            self.count += x.numel()
            return
        if not bool(torch.isfinite(x.sum(dtype=torch.float64))) and not bool(
            torch.isfinite(x).all()
        ):
            raise NumericsError(
                f"lz.quantize_: activations that enter '{self.layers[0]}' are NaN or infinite on "
                "the calibration data; the model or the data is broken before that layer"
            )
        if self.first is None:
            self.first = x.detach().clone()
        with Autocast.off(x.device).again():
            self._count(x)

    def _count(self, x: Tensor) -> None:
        if self.observer is not None:
            self.observer.observe(arranged(x.detach(), "tensor"))
        x_MK = self.rows(x).float()
        total = self.count + len(x_MK)
        share = len(x_MK) / total
        if not self.count:
            zeros = x_MK.new_zeros(x_MK.shape[1])
            self.absmax, self.mean, self.mean_square, self.mean_size = (
                zeros.clone() for _ in range(4)
            )
        size = x_MK.abs()
        torch.maximum(self.absmax, size.amax(0), out=self.absmax)
        self.mean_size.lerp_(size.mean(0), share)
        del size
        self.mean.lerp_(x_MK.mean(0), share)
        self.mean_square.lerp_(x_MK.square().mean(0), share)
        if self._wants_hessian:
            if self.hessian is None:
                self.hessian = x_MK.new_zeros(x_MK.shape[1], x_MK.shape[1])
            self.hessian.addmm_(x_MK.T, x_MK)
        self.count = total

    def as_called(self) -> AbstractContextManager[object]:
        """What the layer is computed in to compare it on `first`."""
        return nullcontext() if self.autocast is None else self.autocast.again()

    def rows(self, x: Tensor) -> Tensor:
        """`x` as (M, K): a row a token, or a place of an image."""
        return x.movedim(1, -1).flatten(0, -2) if self.image else x.reshape(-1, x.shape[-1])

    @torch.no_grad()
    def divide(self, s_K: Tensor) -> None:
        """The inputs are divided by `s_K` from now on: all statistics follow but what the observer
        saw, which is lost; observe again."""
        assert self.first is not None
        self.observer = None
        self.first = (self.first.float() / s_K).to(self.first.dtype)
        for channels in (self.absmax, self.mean, self.mean_size):
            channels.div_(s_K)
        self.mean_square.div_(s_K.square())
        if self.hessian is not None:
            self.hessian.div_(s_K).div_(s_K[:, None])


def together(parts: Sequence[Inputs]) -> Inputs:
    """Statistics of what came through layers that share a weight; the very one of a single part,
    and the first where another's Hessian was used up."""
    first = parts[0]
    if len(parts) == 1 or any(x._wants_hessian and x.hessian is None for x in parts):
        return first
    made, total = copy.copy(first), sum(part.count for part in parts)
    for name in ("mean", "mean_square", "mean_size"):
        mean = sum(getattr(part, name) * (part.count / total) for part in parts)
        setattr(made, name, mean)
    made.absmax = functools.reduce(torch.maximum, (part.absmax for part in parts))
    made.count, made.factor = total, None
    hessians = [part.hessian for part in parts if part.hessian is not None]
    made.hessian = functools.reduce(torch.add, hessians) if hessians else None
    return made
