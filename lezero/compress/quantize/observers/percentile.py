"""The observer that leaves out the rarest values."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.compress.quantize.observers.histogram import BINS, Histogram
from lezero.compress.quantize.observers.observer import observers

KEPT = 0.9999


@observers.register("percentile")
class Percentile(Histogram):
    """Keeps the smallest `KEPT` of all magnitudes (McKinstry et al., 2018, "Discovering
    Low-Precision Networks Close to Full-Precision Networks for Efficient Embedded Inference",
    section 3.2: 99.99% for activations)."""

    def threshold(self, levels: int) -> Tensor:
        share_CB = self.counts_CB.cumsum(1) / self.counts_CB.sum(1, keepdim=True).clamp(min=1)
        # Never fewer bins than the one where the share is reached.
        bins_C = (share_CB < KEPT).sum(1) + 1
        return self.top_C * torch.clamp(bins_C, max=BINS) / BINS
