"""Observers that keep histograms of magnitudes and choose where to cut them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lezero.compress.quantize.observers.minmax import MinMax
from lezero.compress.quantize.observers.observer import Observer, observers

BINS = 2048
_CANDIDATES = 128
_LEAST = 4
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Seen:
    """What came through one channel.

    counts_SB: of the values above 0 and of those below, by magnitude in `BINS` bins of `width`.
    zeros: how many were exactly 0; they are in no bin.
    low, high: the least (at most 0) and the largest (at least 0).
    levels, symmetric: the grid's, as `Observer.range` has them.
    """

    counts_SB: Tensor
    zeros: float
    width: float
    low: float
    high: float
    levels: int
    symmetric: bool

    def step(self, cut: float) -> float:
        """Between two codes, where magnitudes up to `cut` are kept."""
        above, below = self.sides(cut)
        if self.symmetric:
            return max(above, below) / (self.levels // 2 - 1)
        return (above + below) / (self.levels - 1)

    def sides(self, cut: float) -> tuple[float, float]:
        """How far the range goes above 0 and below it."""
        return min(self.high, cut), min(-self.low, cut)

    def candidates(self, first: int) -> Iterable[int]:
        """Numbers of bins to try: all of them, then ever fewer down to `first`."""
        return range(BINS, first - 1, -max(1, (BINS - first) // _CANDIDATES))


class Histogram(Observer):
    """Counts of positive and of negative values in `BINS` equal bins of their magnitude a channel;
    the range is what `threshold` keeps on both sides.

    When larger values come, the bins become twice as wide as often as it takes, so that neither all
    values nor a first guess of their range is needed.
    """

    def __init__(self, channels: int = 1) -> None:
        super().__init__(channels)
        self._extremes = MinMax(channels)
        self.counts_CSB = torch.zeros(channels, 2, BINS, dtype=torch.float64, device="cpu")
        self.zeros_C = torch.zeros(channels, dtype=torch.float64, device="cpu")
        self.top_C = torch.zeros(channels, dtype=torch.float64, device="cpu")

    def observe(self, x_CN: Tensor) -> None:
        self._extremes.observe(x_CN)
        low_C, high_C = (x.double().cpu() for x in x_CN.detach().aminmax(dim=1))
        self._widen(torch.maximum(high_C, -low_C))
        top_C1 = torch.where(self.top_C > 0, self.top_C, 1.0)[:, None]  # zeros have no bin
        counts_CN = self.counts_CSB.view(self.channels, 2 * BINS)
        # Some at a time: bins and counts take eight times the memory of 16-bit values.
        for part in x_CN.detach().split(max(1, _AT_ONCE // self.channels), dim=1):
            part = part.float().cpu()
            bin_CN = (part.abs() / top_C1 * BINS).long().clamp(max=BINS - 1)
            bin_CN += BINS * (part < 0)
            counts_CN.scatter_add_(1, bin_CN, (part != 0).double())
            self.zeros_C += (part == 0).sum(1)

    def range(self, levels: int, symmetric: bool = False) -> tuple[Tensor, Tensor]:
        low_C, high_C = self._extremes.range(levels)
        tops = self.top_C.tolist()
        seen = (
            Seen(counts_SB, float(zeros), top / BINS, low, high, levels, symmetric)
            for counts_SB, zeros, top, low, high in zip(
                *(self.counts_CSB, self.zeros_C, tops, low_C.tolist(), high_C.tolist()), strict=True
            )
        )
        cuts = [self.threshold(one) for one in seen]
        cut_C = torch.tensor(cuts, dtype=torch.float32, device=low_C.device)
        return torch.maximum(low_C, -cut_C), torch.minimum(high_C, cut_C)

    @abstractmethod
    def threshold(self, seen: Seen) -> float:
        """The magnitude up to which values of one channel are kept."""

    def _widen(self, top_C: Tensor) -> None:
        # In 64 bits: twice what 32 bits hold may be more than they do.
        # A channel that held only zeros has no width yet.
        self.top_C = torch.where(self.top_C == 0, top_C, self.top_C)
        while bool((wider := top_C > self.top_C).any()):
            halved = self.counts_CSB.view(self.channels, 2, -1, 2).sum(3)
            folded = torch.cat([halved, torch.zeros_like(halved)], 2)
            self.counts_CSB = torch.where(wider[:, None, None], folded, self.counts_CSB)
            self.top_C = torch.where(wider, self.top_C * 2, self.top_C)


@observers.register("kl")
class KLDivergence(Histogram):
    """The cut whose quantized distribution is nearest to the real one in information.

    Migacz, "8-bit Inference with TensorRT" (GTC 2017), "Entropy calibration": for each number of
    bins i, P is the first i bins with what lies beyond added to the last, Q the same bins
    without it, in as many steps as the grid has there, spread evenly over the bins that hold
    something; the smallest D(P‖Q) = Σ P log(P / Q) wins. Fewer values than `_LEAST` a bin are
    mostly the noise of their counts, which wide ranges lose most of: nothing is cut then. Bins are
    of magnitudes; a sign whose values no candidate would cut is left out (what GELU or a leaky ReLU
    lets through below 0 is so dense that its shape alone would decide, at the cost of all others),
    and the bin at 0 counts as its neighbour does for the same reason.
    """

    def threshold(self, seen: Seen) -> float:
        if seen.counts_SB.sum() < _LEAST * BINS:
            return seen.width * BINS
        first = min(_codes(seen, max(seen.high, -seen.low)), BINS // 2)
        sides = torch.tensor([seen.high, -seen.low], dtype=torch.float64, device="cpu")
        long = sides > first * seen.width
        counts_B = seen.counts_SB[long].sum(0)
        counts_B[0] = counts_B[1]
        cuts = [bins * seen.width for bins in seen.candidates(first)]
        found = [
            _divergence(counts_B, bins, min(bins, _codes(seen, cut)))
            for bins, cut in zip(seen.candidates(first), cuts, strict=True)
        ]
        return cuts[min(range(len(cuts)), key=found.__getitem__)]


@observers.register("mse")
class MeanSquaredError(Histogram):
    """The cut with the smallest expected squared error: that of rounding for what is kept and of
    saturating for what is not, both for values that lie evenly within their bin.

    Sung, Shin, Hwang, "Resiliency of Deep Neural Networks under Quantization" (2015), section 3.
    """

    def threshold(self, seen: Seen) -> float:
        edges = torch.arange(BINS + 1, dtype=torch.float64, device="cpu") * seen.width
        best, kept = math.inf, seen.width * BINS
        for bins in seen.candidates(min(seen.levels // 2, BINS // 32)):
            cut = bins * seen.width
            rounding_B = _rounding(edges, seen.step(cut))
            kept_S = torch.tensor(seen.sides(cut), dtype=torch.float64, device="cpu")
            beyond_SB = (edges[:-1] + seen.width / 2) - kept_S[:, None]
            saturating_SB = beyond_SB.square() + seen.width**2 / 12
            error_SB = torch.where(beyond_SB > 0, saturating_SB, rounding_B)
            error = float((seen.counts_SB * error_SB).sum())
            if error < best:
                best, kept = error, cut
        return kept


def _codes(seen: Seen, cut: float) -> int:
    """How many of the grid's codes lie from 0 to `cut`."""
    step = seen.step(cut)
    return 1 + round(cut / step) if step > 0 else seen.levels


def _rounding(edges: Tensor, step: float) -> Tensor:
    """Mean squared error in each bin of rounding to multiples of `step`.

    It is the integral of (u - round(u))² over the bin, in steps: 1/12 for each whole one.
    """
    u = edges / step
    whole = torch.floor(u + 0.5)
    integral = whole / 12 + (u - whole) ** 3 / 3
    return step**2 * integral.diff() / u.diff()


def _divergence(counts_B: Tensor, bins: int, levels: int) -> float:
    real = counts_B[:bins]
    reference = real.clone()
    reference[-1] += counts_B[bins:].sum()
    step = torch.arange(bins, device="cpu") * levels // bins
    filled = (real > 0).double()
    total = real.new_zeros(levels).scatter_add_(0, step, real)
    places = real.new_zeros(levels).scatter_add_(0, step, filled)
    coarse = (total / places.clamp(min=1))[step] * filled
    P = reference / reference.sum().clamp(min=1e-300)
    Q = coarse / coarse.sum().clamp(min=1e-300)
    # Where Q has nothing and P something, a floor instead of infinity.
    return float(torch.where(P > 0, P * (P / Q.clamp(min=1e-12)).log(), 0.0).sum())
