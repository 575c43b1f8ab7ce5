"""Observers: they see values and say which range of them is worth a scale."""

from lezero.compress.quantize.observers.histogram import Histogram, KLDivergence, MeanSquaredError
from lezero.compress.quantize.observers.minmax import MinMax
from lezero.compress.quantize.observers.observer import Observer, arranged, observers
from lezero.compress.quantize.observers.percentile import Percentile
from lezero.compress.quantize.observers.scales import RULES_OF_GROUPS, weight_scale

__all__ = [
    "RULES_OF_GROUPS",
    "Histogram",
    "KLDivergence",
    "MeanSquaredError",
    "MinMax",
    "Observer",
    "Percentile",
    "arranged",
    "observers",
    "weight_scale",
]
