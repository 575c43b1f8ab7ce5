"""Observers that keep a histogram of magnitudes and choose where to cut it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from lezero.compress.quantize.observers.minmax import MinMax
from lezero.compress.quantize.observers.observer import Observer, observers

BINS = 2048
_CANDIDATES = 128
_LEAST = 4
_AT_ONCE = 1 << 16


class Histogram(Observer):
    """Counts of |x| in `BINS` equal bins a channel; the range is what `threshold` keeps.

    When larger values come, the bins become twice as wide as often as it takes, so that neither all
    values nor a first guess of their range is needed.
    """

    def __init__(self, channels: int = 1) -> None:
        super().__init__(channels)
        self._extremes = MinMax(channels)
        self.counts_CB = torch.zeros(channels, BINS, dtype=torch.float64, device="cpu")
        self.top_C = torch.zeros(channels, dtype=torch.float32, device="cpu")

    def observe(self, x_CN: Tensor) -> None:
        self._extremes.observe(x_CN)
        low_C, high_C = (x.float().cpu() for x in x_CN.detach().aminmax(dim=1))
        self._widen(torch.maximum(high_C, -low_C))
        top_C1 = torch.where(self.top_C > 0, self.top_C, 1.0)[:, None]  # zeros have one bin
        # Some at a time: bins and counts take eight times the memory of 16-bit values.
        for part in x_CN.detach().split(max(1, _AT_ONCE // self.channels), dim=1):
            size_CN = part.abs().float().cpu()
            bin_CN = (size_CN / top_C1 * BINS).long().clamp(max=BINS - 1)
            self.counts_CB.scatter_add_(1, bin_CN, torch.ones_like(bin_CN, dtype=torch.float64))

    def range(self, levels: int) -> tuple[Tensor, Tensor]:
        low, high = self._extremes.range(levels)
        one_sided = bool((low == 0).all() or (high == 0).all())
        # A range from 0 has all codes on one side, another has half of them on each.
        cut = self.threshold(levels if one_sided else (levels + 1) // 2).to(low.device)
        return torch.maximum(low, -cut), torch.minimum(high, cut)

    @abstractmethod
    def threshold(self, levels: int) -> Tensor:
        """The magnitude to keep, (channels,), where `levels` codes cover 0 … threshold."""

    def edges(self, bins: int) -> Tensor:
        """The magnitude at the upper end of the first `bins` bins."""
        return self.top_C * (bins / BINS)

    def candidates(self, levels: int) -> Iterable[int]:
        """Numbers of bins to try, from as many as there are levels."""
        first = min(levels, BINS // 2)
        return range(BINS, first - 1, -max(1, (BINS - first) // _CANDIDATES))

    def _widen(self, top_C: Tensor) -> None:
        empty = self.counts_CB.sum(1) == 0
        self.top_C = torch.where(empty, top_C, self.top_C)
        # A channel that held only zeros has no width yet; its counts all lie in bin 0.
        self.top_C = torch.where(self.top_C == 0, top_C, self.top_C)
        while bool((wider := top_C > self.top_C).any()):
            halved = self.counts_CB.view(self.channels, -1, 2).sum(2)
            folded = torch.cat([halved, torch.zeros_like(halved)], 1)
            self.counts_CB = torch.where(wider[:, None], folded, self.counts_CB)
            self.top_C = torch.where(wider, self.top_C * 2, self.top_C)


@observers.register("kl")
class KLDivergence(Histogram):
    """The cut whose quantized distribution is nearest to the real one in information.

    Migacz, "8-bit Inference with TensorRT" (GTC 2017), "Entropy calibration": for each number of
    bins i, P is the first i bins with what lies beyond added to the last, Q the same bins
    without it, in `levels` steps spread evenly over the bins that hold something; the smallest
    D(P‖Q) = Σ P log(P / Q) wins. Fewer values than `_LEAST` a bin are mostly the noise of their
    counts, which wide ranges lose most of: nothing is cut then. The bin of 0 counts as its
    neighbour does: zeros have no rounding error, and where half of all values are 0 (after a ReLU)
    they would decide alone.
    """

    def threshold(self, levels: int) -> Tensor:
        best_C = torch.full((self.channels,), torch.inf, dtype=torch.float64, device="cpu")
        cut_C = self.top_C.clone()
        counts_CB = self.counts_CB.clone()
        counts_CB[:, 0] = counts_CB[:, 1]
        for bins in self.candidates(levels):
            divergence_C = _divergence(counts_CB, bins, levels)
            better = divergence_C < best_C
            best_C = torch.where(better, divergence_C, best_C)
            cut_C = torch.where(better, self.edges(bins), cut_C)
        return torch.where(self.counts_CB.sum(1) < _LEAST * BINS, self.top_C, cut_C)


@observers.register("mse")
class MeanSquaredError(Histogram):
    """The cut with the smallest expected squared error: that of rounding (step² / 12) for what is
    kept and of saturating for what is not.

    Sung, Shin, Hwang, "Resiliency of Deep Neural Networks under Quantization" (2015), section 3;
    the closed form for known distributions is Banner et al., 2019, "Post training 4-bit
    quantization of convolutional networks for rapid-deployment", equation 2.
    """

    def threshold(self, levels: int) -> Tensor:
        at_B = torch.arange(BINS, dtype=torch.float32, device="cpu")
        middle_CB = (at_B + 0.5) / BINS * self.top_C[:, None]
        best_C = torch.full((self.channels,), torch.inf, dtype=torch.float64, device="cpu")
        cut_C = self.top_C.clone()
        for bins in self.candidates(min(levels, BINS // 32)):
            cut = self.edges(bins)
            beyond = (middle_CB - cut[:, None]).clamp(min=0).double().square()
            rounding = (cut.double() / max(1, levels - 1)).square() / 12
            # What lies in the first bin is 0 for the most part and has no error.
            inside = self.counts_CB[:, 1:bins].sum(1)
            error_C = (self.counts_CB * beyond).sum(1) + inside * rounding
            better = error_C < best_C
            best_C = torch.where(better, error_C, best_C)
            cut_C = torch.where(better, cut, cut_C)
        return cut_C


def _divergence(counts_CB: Tensor, bins: int, levels: int) -> Tensor:
    channels = len(counts_CB)
    real = counts_CB[:, :bins]
    reference = real.clone()
    reference[:, -1] += counts_CB[:, bins:].sum(1)
    step = torch.arange(bins, device="cpu") * levels // bins
    step_CB = step.expand(channels, bins)
    filled = (real > 0).double()
    total = real.new_zeros(channels, levels).scatter_add_(1, step_CB, real)
    places = real.new_zeros(channels, levels).scatter_add_(1, step_CB, filled)
    coarse = (total / places.clamp(min=1)).gather(1, step_CB) * filled
    P = reference / reference.sum(1, keepdim=True).clamp(min=1e-300)
    Q = coarse / coarse.sum(1, keepdim=True).clamp(min=1e-300)
    # Where Q has nothing and P something, a floor instead of infinity.
    return torch.where(P > 0, P * (P / Q.clamp(min=1e-12)).log(), 0.0).sum(1)
