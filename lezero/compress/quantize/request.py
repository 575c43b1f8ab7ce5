"""What one call of `lz.quantize_` asks for: what its parts hand to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lezero.compress.quantize.batches import Batch
from lezero.compress.quantize.report import QuantizationReport
from lezero.compress.quantize.scheme import Scheme, Target
from lezero.compress.quantize.sites import Site

Objective = Literal["speed", "size"]
Metric = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Request:
    """The checked arguments of `quantize_`, and the report that is filled.

    targets: what each weight becomes, by the names of all layers that use it. batches: None without
    calibration data.
    """

    model: nn.Module
    scheme: Scheme
    targets: dict[str, tuple[Site, Target]]
    batches: list[Batch] | None
    objective: Objective
    metric: Metric | None
    budget: float | None
    report: QuantizationReport
