"""Which layers of W8A8 do not round a token's inputs with one scale: where that costs out of line.

A token whose values differ much in size loses its small ones by it; what SmoothQuant moves away
needs a layer before it that takes it. The cost is measured for each layer on the first calibration
batch:

    c = sqrt(mean over tokens of ‖y8 - y16‖² / ‖y16‖²)

with y8 and y16 the outputs of the quantized layer for rounded inputs and for 16-bit ones. Tokens
count alike, since a few with massive values would hide the others. Layers that share their inputs
(query, key and value) decide together, by the mean of their c, so that engines can go on to join
them. Where it is above `exact_above` times the median of all c they get the next better way:

    8 bits in blocks    a scale for each 32 inputs: some 1.3 times the time. Where its c is not
                        above that too, and it is measured to be faster than the next; also where
                        only it is faster than the float layer, when speed is what is asked for
    16 bits             about twice the time

It is the median's multiple, so never most of a model.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeGuard

from torch import Tensor

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.layer import output_error
from lezero.compress.quantize.modules import QuantizedLayer, QuantizedLinear
from lezero.compress.quantize.report import QuantizationReport
from lezero.compress.quantize.scheme import Target
from lezero.compress.quantize.sites import Site, User
from lezero.compress.quantize.speed import LayerSpeed
from lezero.compress.quantize.weights import PackedWeight
from lezero.core import groups
from lezero.report.units import percent

WHOLE, BLOCKS, EXACT = "8 bits", "8 bits in blocks", "16 bits"
_BLOCK = 32
_SUFFIX = {BLOCKS: " × int8 in blocks", EXACT: ""}
_AT_ONCE = 1 << 20  # outputs that are compared together


@dataclass(frozen=True)
class _Way:
    """How the inputs of one weight's layers are taken: what it costs, the error of the outputs, and
    seconds of the float layers and of these."""

    form: str
    cost: float
    error: float
    seconds: tuple[float, float]


@dataclass(frozen=True)
class _Measured:
    """One weight. `shared`: the first layer that is given these inputs; `ways`: beside rounding
    whole tokens, which costs `cost`."""

    site: Site
    shared: str
    cost: float
    ways: dict[str, _Way]


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
        rounding = [entry for entry in seen if _rounds(entry[1])]
        if not rounding:
            return
        triples = [(user.module, layer, x) for user, layer, x in rounding]
        modules, layers, xs = zip(*triples, strict=True)
        cost = max(_cost(layer, x, WHOLE) for layer, x in zip(layers, xs, strict=True))
        ways = {}
        for way in _ways(layers):
            _take(layers, way)
            form = replace(target, activations="float").label + _SUFFIX[way]
            errors = [output_error(site, y, m.forward(x), y.forward(x)) for m, y, x in triples]
            seconds = self.speed.measure(form, modules, layers, xs)
            costs = [_cost(layer, x, way) for layer, x in zip(layers, xs, strict=True)]
            ways[way] = _Way(form, max(costs), max(errors), seconds)
        _take(layers, WHOLE)
        shared = inputs[rounding[0][0].name].layers[0]
        self._measured[site.name] = _Measured(site, shared, cost, ways)

    def decide(self, report: QuantizationReport, *, speed: bool) -> None:
        """Gives layers that are out of line a better way, as decisions with their figures; with
        `speed` only one that is faster than before."""
        if not self._measured:
            return
        # Rank 0's figures count on every rank: a decision that only some come to would hang them.
        measured = groups.broadcast_object(
            [
                (one.cost, {way: asdict(found) for way, found in one.ways.items()})
                for one in self._measured.values()
            ]
        )
        together: dict[str, list[_Measured]] = defaultdict(list)
        for one, (cost, ways) in zip(self._measured.values(), measured, strict=True):
            main = {way: _Way(**{**f, "seconds": tuple(f["seconds"])}) for way, f in ways.items()}
            together[one.shared].append(replace(one, cost=cost, ways=main))
        usual = statistics.median(cost for cost, _ in measured)
        places = {layer.name: place for place, layer in enumerate(report.layers)}
        for own in together.values():
            way = self._way_of(own, usual, report, speed)
            for one in own:
                taken = one.ways.get(way)
                if taken is None:
                    continue
                _take([user.module for user in one.site.users], way)
                place, (before, after) = places[one.site.name], taken.seconds
                report.layers[place] = replace(
                    report.layers[place],
                    form=taken.form,
                    error=taken.error,
                    seconds_before=before,
                    seconds_after=after,
                )

    def _way_of(
        self, own: list[_Measured], usual: float, report: QuantizationReport, speed: bool
    ) -> str:
        """How the inputs of these layers are taken, recorded where they are out of line."""
        topic = f"inputs of {', '.join(one.site.name for one in own)}"
        cost, most = statistics.mean(one.cost for one in own), self.exact_above * usual
        usually = cost <= most
        if usually and topic not in report.decisions.replay:
            return WHOLE
        why = (
            f"rounding them to int8 changes the outputs by {percent(cost)}, those of the layer in "
            f"the middle by {percent(usual)}"
        )
        ways = [way for way in (BLOCKS, EXACT) if all(way in one.ways for one in own)]
        best = {way: [one.ways[way] for one in own] for way in ways}
        slow = [w for w, y in best.items() if not all(self.speed.is_faster(*x.seconds) for x in y)]
        fits = [way for way in ways if not (speed and way in slow)]
        if BLOCKS in fits:
            blocks = statistics.mean(x.cost for x in best[BLOCKS])
            why += f", in blocks of {_BLOCK} by {percent(blocks)}"
        if fits == [BLOCKS, EXACT]:
            spent = [sum(x.seconds[1] for x in best[way]) for way in fits]
            if blocks > most or not self.speed.is_faster(spent[1], spent[0]):
                fits.remove(BLOCKS)
        if not fits:
            why += "; but with more than that not every layer is faster than before"
        chosen = WHOLE if usually or not fits else fits[0]
        return report.decisions.record(topic, chosen, reason=why)


def _rounds(layer: object) -> TypeGuard[QuantizedLinear]:
    return isinstance(layer, QuantizedLinear) and layer.x_bits == 8 and layer.input_scale is None


def _ways(layers: Sequence[QuantizedLinear]) -> tuple[str, ...]:
    """Those that such layers have, the better ones last."""
    packed = all(isinstance(layer.weight, PackedWeight) for layer in layers)
    return (BLOCKS, EXACT) if packed else (EXACT,)


def _take(layers: Sequence[object], way: str) -> None:
    for layer in layers:
        if isinstance(layer, QuantizedLinear):
            layer.x_bits = 16 if way == EXACT else 8
            layer.x_block = _BLOCK if way == BLOCKS else 0


def _cost(layer: QuantizedLinear, x: Tensor, way: str) -> float:
    """c of taking a layer's inputs so."""
    _take([layer], EXACT)
    if way == EXACT:
        return 0.0
    exact = layer.forward(x)
    _take([layer], way)
    return token_error(exact, layer.forward(x))


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
