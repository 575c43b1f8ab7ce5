"""Which layers keep their inputs in 16 bits: those where rounding them costs out of line.

In W8A8 every token of a layer's inputs is rounded to int8 with one scale, so a token whose values
differ much in size loses its small ones; what SmoothQuant moves away needs a layer before it that
takes it. The cost is measured for each layer on the first calibration batch:

    c = sqrt(mean over tokens of ‖y8 - y16‖² / ‖y16‖²)

with y8 and y16 the outputs of the quantized layer for rounded inputs and for 16-bit ones. Tokens
count alike, since a few with massive values would hide the others. Layers that share their inputs
(query, key and value) decide together, by the mean of their c, so that engines can go on to join
them. Where it is above `exact_above` times the median of all c they compute with 16-bit inputs:
about twice the time of the same layers in W8A8. It is the median's multiple, so never most of a
model.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.layer import output_error
from lezero.compress.quantize.modules import QuantizedLayer, QuantizedLinear
from lezero.compress.quantize.report import QuantizationReport
from lezero.compress.quantize.scheme import Target
from lezero.compress.quantize.sites import Site, User
from lezero.compress.quantize.speed import LayerSpeed
from lezero.core import groups
from lezero.report.units import percent

_AT_ONCE = 1 << 20  # outputs that are compared together


@dataclass(frozen=True)
class _Measured:
    """One weight: the cost of rounding its inputs, and the error and speed without. `shared`: the
    first layer that is given these inputs."""

    site: Site
    shared: str
    form: str
    cost: float
    error: float
    seconds: tuple[float, float]


class InputRounding:
    """Measures layers as they are quantized (`look`), and decides when all are (`decide`)."""

    def __init__(self, exact_above: float, speed: LayerSpeed) -> None:
        self.exact_above, self.speed = exact_above, speed
        self._measured: dict[str, _Measured] = {}

    def look(
        self,
        site: Site,
        target: Target,
        seen: Sequence[tuple[User, QuantizedLayer, Tensor]],
        inputs: dict[str, Inputs],
    ) -> None:
        """Measures the layers of one weight beside the float ones, each on its input."""
        form = replace(target, activations="float").label
        rounding = [entry for entry in seen if _rounds(entry[1])]
        if not rounding:
            return
        pairs = [(user.module, layer, x) for user, layer, x in rounding]
        shared = inputs[rounding[0][0].name].layers[0]
        costs, errors = [], []
        for module, layer, x in pairs:
            rounded = layer.forward(x)
            _set_bits([layer], 16)
            exact = layer.forward(x)
            costs.append(token_error(exact, rounded))
            del rounded
            errors.append(output_error(site, layer, module.forward(x), exact))
        before, after, xs = zip(*pairs, strict=True)
        seconds = self.speed.measure(form, before, after, xs)
        _set_bits(after, 8)
        self._measured[site.name] = _Measured(site, shared, form, max(costs), max(errors), seconds)

    def decide(self, report: QuantizationReport, *, speed: bool) -> None:
        """Gives layers that are out of line 16-bit inputs, as decisions with their figures; with
        `speed` only those that are faster so than before."""
        if not self._measured:
            return
        # Rank 0's figures count on every rank: a decision that only some come to would hang them.
        measured = groups.broadcast_object(
            [(one.cost, one.error, one.seconds) for one in self._measured.values()]
        )
        together: dict[str, list[_Measured]] = defaultdict(list)
        for one, (cost, error, seconds) in zip(self._measured.values(), measured, strict=True):
            main = replace(one, cost=cost, error=error, seconds=(seconds[0], seconds[1]))
            together[main.shared].append(main)
        usual = statistics.median(cost for cost, _, _ in measured)
        exact = [own for own in together.values() if self._is_exact(own, usual, report, speed)]
        places = {layer.name: place for place, layer in enumerate(report.layers)}
        for one in (one for group in exact for one in group):
            _set_bits([user.module for user in one.site.users], 16)
            place, (before, after) = places[one.site.name], one.seconds
            report.layers[place] = replace(
                report.layers[place],
                form=one.form,
                error=one.error,
                seconds_before=before,
                seconds_after=after,
            )

    def _is_exact(
        self, group: list[_Measured], usual: float, report: QuantizationReport, speed: bool
    ) -> bool:
        """Whether these layers' inputs stay in 16 bits, recorded where they are out of line."""
        topic = f"inputs of {', '.join(one.site.name for one in group)}"
        cost = statistics.mean(one.cost for one in group)
        usually = cost <= self.exact_above * usual
        if usually and topic not in report.decisions.replay:
            return False
        slow = speed and not all(self.speed.is_faster(*one.seconds) for one in group)
        why = (
            f"rounding them to int8 changes the outputs by {percent(cost)}, those of the layer in "
            f"the middle by {percent(usual)}"
        )
        if slow:
            why += "; but with 16 bits not every layer is faster than before"
        chosen = "8 bits" if slow or usually else "16 bits"
        return report.decisions.record(topic, chosen, reason=why) == "16 bits"


def _rounds(layer: object) -> bool:
    return isinstance(layer, QuantizedLinear) and layer.x_bits == 8 and layer.input_scale is None


def _set_bits(layers: Sequence[object], bits: int) -> None:
    for layer in layers:
        if isinstance(layer, QuantizedLinear):
            layer.x_bits = bits


def token_error(exact: Tensor, rounded: Tensor) -> float:
    """c of two outputs (…, N); tokens that give nothing but zeros, or what is not finite, do not
    count."""
    total, count = 0.0, 0
    y_MN, y8_MN = (y.reshape(-1, y.shape[-1]) for y in (exact, rounded))
    rows = max(1, _AT_ONCE // max(1, y_MN.shape[1]))
    for one, two in zip(y_MN.split(rows), y8_MN.split(rows), strict=True):
        size = one.float().square().sum(1)
        wrong = (two.float() - one.float()).square().sum(1)
        used = (size > 0) & (size + wrong).isfinite()
        total += float((wrong[used] / size[used]).sum())
        count += int(used.sum())
    return float((total / max(1, count)) ** 0.5)
