"""What quantization did to a model: layer by layer, and as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from lezero.compress.quantize.modules import check_module
from lezero.compress.quantize.speed import AS_IT_WAS
from lezero.core.decisions import Decisions
from lezero.core.errors import OrderError
from lezero.report import units

REPORT = "_lezero_quantization"
_SHOWN = 5


@dataclass(frozen=True)
class LayerReport:
    """One weight. `form`: what it is now ("int8", "int4 g64", …, or "as it was" and why).

    bits: stored, per weight, scales included. error: ‖quantized - float‖ / ‖float‖ of the layer's
    outputs on the first calibration batch; of the weight without data, and where those are zeros.
    seconds_before and seconds_after: of the layer on that batch; None where nothing was measured.
    """

    name: str
    form: str
    weights: int
    bits: float
    error: float | None = None
    seconds_before: float | None = None
    seconds_after: float | None = None
    reason: str = ""
    shared_with: tuple[str, ...] = ()

    @property
    def quantized(self) -> bool:
        return not self.reason


@dataclass
class QuantizationReport:
    """`print(lz.quantization_report(model))` shows it as a table.

    bytes: of all parameters and buffers. quality: what `metric` gave, or without one the relative
    error of the model's outputs on the first batch (`metric_name` says which; before: 0). seconds:
    of the whole model on the first batch. left_over: weights that are in no layer which can be
    quantized, by class and parameter.
    """

    layers: list[LayerReport] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    metric_name: str = ""
    quality_before: float | None = None
    quality_after: float | None = None
    seconds_before: float | None = None
    seconds_after: float | None = None
    notes: list[str] = field(default_factory=list)
    left_over: dict[str, int] = field(default_factory=dict)
    decisions: Decisions = field(default_factory=Decisions)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values; the decisions apart."""
        return {
            **{
                key: value
                for key, value in vars(self).items()
                if key not in ("layers", "decisions")
            },
            "layers": [asdict(layer) for layer in self.layers],
        }

    def undone(self, note: str, bits: Mapping[str, float]) -> None:
        """The model is as it was; `note` says why, where the layers do not. bits: of each layer."""
        self.layers = [
            replace(x, form=AS_IT_WAS, bits=bits[x.name], reason=f"{x.form} by itself is faster")
            if x.quantized
            else x
            for x in self.layers
        ]
        self.bytes_after, self.seconds_after = self.bytes_before, self.seconds_before
        if self.quality_after is not None:
            self.quality_after = self.quality_before
        self.notes = [note] if note else []

    def worst(self, count: int = 5) -> list[LayerReport]:
        """The quantized layers with the largest errors."""
        done = [layer for layer in self.layers if layer.quantized and layer.error is not None]
        return sorted(done, key=lambda layer: -(layer.error or 0.0))[:count]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("layer", "form", "weights", "bits", "error", "before", "after")
        ]
        for layer in self.layers:
            shared = f" (= {', '.join(layer.shared_with)})" if layer.shared_with else ""
            kept = f": {layer.reason}" if layer.reason else ""
            figures = (
                units.count(layer.weights),
                f"{layer.bits:.2f}",
                "" if layer.error is None else units.percent(layer.error),
                *(
                    "" if s is None else units.span(s)
                    for s in (layer.seconds_before, layer.seconds_after)
                ),
            )
            rows.append((layer.name + shared, layer.form + kept, *figures))
        lines = _aligned(rows)
        forms = Counter(layer.form for layer in self.layers)
        lines += ["", "layers: " + ", ".join(f"{n} {form}" for form, n in forms.most_common())]
        ratio = self.bytes_after / max(1, self.bytes_before)
        before, after = units.size(self.bytes_before), units.size(self.bytes_after)
        lines.append(f"size: {before} → {after} ({ratio:.2f} of it)")
        lines += self._left_over()
        if self.quality_after is not None:
            was = "" if self.quality_before is None else f"{units.number(self.quality_before)} → "
            lines.append(f"{self.metric_name}: {was}{units.number(self.quality_after)}")
        if self.seconds_before is not None and self.seconds_after is not None:
            speedup = self.seconds_before / max(1e-12, self.seconds_after)
            times = f"{units.span(self.seconds_before)} → {units.span(self.seconds_after)}"
            lines.append(f"one batch: {times} ({speedup:.2f} times as fast)")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _left_over(self) -> list[str]:
        line = in_no_layer(self.left_over, sum(layer.weights for layer in self.layers))
        return [line] if line else []


def quantization_report(model: nn.Module) -> QuantizationReport:
    """The report of the `lz.quantize_` that `model` went through; `OrderError` if it did not."""
    check_module(model, "lz.quantization_report")
    found = model.__dict__.get(REPORT)
    if found is None:
        raise OrderError("this model has no quantization report; call lz.quantize_ on it first")
    assert isinstance(found, QuantizationReport)
    return found


def in_no_layer(left_over: Mapping[str, int], in_layers: int) -> str:
    """A line when what cannot be quantized is at least a hundredth of all; in_layers: the weights
    that can be."""
    left = sum(left_over.values())
    share = left / max(1, left + in_layers)
    if share < 0.01:
        return ""
    largest = sorted(left_over.items(), key=lambda item: -item[1])[:_SHOWN]
    each = ", ".join(f"{name} {units.count(weights)}" for name, weights in largest)
    return f"in no layer that can be quantized: {units.percent(share)} of weights ({each})"


def named(names: Sequence[str]) -> str:
    """Layers as a note names them: the first few, and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
