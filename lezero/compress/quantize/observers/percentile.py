"""The observer that leaves out the rarest values."""

from __future__ import annotations

from lezero.compress.quantize.observers.histogram import BINS, Histogram, Seen
from lezero.compress.quantize.observers.observer import observers

KEPT = 0.9999


@observers.register("percentile")
class Percentile(Histogram):
    """Keeps the smallest `KEPT` of all magnitudes (McKinstry et al., 2018, "Discovering
    Low-Precision Networks Close to Full-Precision Networks for Efficient Embedded Inference",
    section 3.2: 99.99% for activations)."""

    def threshold(self, seen: Seen) -> float:
        up_to_B = seen.counts_SB.sum(0).cumsum(0) + seen.zeros
        # Never fewer bins than the one where the share is reached.
        bins = int((up_to_B < KEPT * up_to_B[-1]).sum()) + 1
        return seen.width * min(bins, BINS)
