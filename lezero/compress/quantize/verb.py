"""The verbs: `lz.quantize_(model, lz.Int4Weight(group=64), data=calibration)`, `lz.dequantize_`."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import nn

from lezero.compress.quantize.agreed import agreed, begun_alike
from lezero.compress.quantize.batch_norm import folded_batch_norms, unfold_batch_norms_
from lezero.compress.quantize.batches import (
    Batch,
    call,
    first_call,
    given,
    quiet,
    read_batches,
    tensors_of,
)
from lezero.compress.quantize.budget import check_budget, need_finite, output_difference
from lezero.compress.quantize.buffers import as_it_was
from lezero.compress.quantize.foreign_saves import forget_form
from lezero.compress.quantize.journal import Journal
from lezero.compress.quantize.methods import methods
from lezero.compress.quantize.modules import QuantizedLayer, check_module, quantized_layers
from lezero.compress.quantize.nested import leave_nested, take_nested
from lezero.compress.quantize.report import REPORT, QuantizationReport
from lezero.compress.quantize.request import Metric, Objective, Request
from lezero.compress.quantize.scheme import Scheme, Target
from lezero.compress.quantize.sites import Filter, Site, find_sites, left_over
from lezero.compress.quantize.speed import of_the_whole
from lezero.compress.quantize.spill import Spill
from lezero.compress.quantize.suited import check_suited, notes_of_adapters, notes_of_method
from lezero.compress.quantize.tensors import nbytes
from lezero.compress.quantize.work import Work
from lezero.core import device, ledger
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError, LeZeroError, NumericsError, OrderError
from lezero.core.interrupts import held_interrupts, let_in, passed_on_at
from lezero.core.log import logger
from lezero.nn.modes import OWN_STATISTICS, evaluating, uncompiled

Model = TypeVar("Model", bound=nn.Module)
_LOG = logger("compress")
# How much slower the whole may look before it counts: two runs of one model differ by as much.
_WHOLE_MARGIN = 0.02


def quantize_(
    model: Model,
    config: Scheme,
    *,
    data: Any = None,
    filter: Filter = None,
    objective: Objective = "speed",
    metric: Metric | None = None,
    budget: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    decisions: Decisions | None = None,
) -> Model:
    """Quantizes the weights of `model` in place, measured on this machine; returns the model.

    Linear layers, embeddings and convolutions change their class (`compress.quantize.modules`
    documents their `state_dict`); all names of modules stay. `lz.quantization_report(model)` shows
    what became of each layer; `lz.dequantize_` gives plain layers back. Either all of it is done or
    the model is exactly as it was, whatever fails: Ctrl-C waits for a moment at which that holds
    (pressed again while the model runs, it does not wait).

    Args:
        config: `Int8Weight`, `Int8WeightActivation`, `Int4Weight`, `Fp8` or `Nf4`.
        data: calibration batches: an iterable of tensors, tuples of arguments or mappings of
            keyword arguments, or one of these as the only batch (a list is always several). It goes
            through the model block by block, so that memory stays near that of the model
            (docs/quantization.md).
        filter: patterns of layer names ("*.mlp.*"; after a "!" of those to leave out), or a
            function of (name, module); other layers stay as they are (a norm whose outputs only
            chosen layers read may take in the scales of their channels).
        objective: "speed" leaves a layer as it was unless its quantized form is faster here, at the
            shapes of the first batch (without data: for one token). "size" leaves only those that
            would not become smaller.
        metric: a function of the model, smaller is better (a loss); else the relative error of the
            outputs on the first batch counts.
        budget: the fraction by which `metric` may grow; without one the largest error of outputs.
        optimizer: one that holds quantized parameters is refused: they leave the model.
        decisions: the record of the run that the choices go into.

    In a process group every rank calls it, with the same model and data, which is checked: what
    rank 0 measures counts for all.

    Errors: `ConfigError` (a value, a module wrapped by torch.compile or DDP, data that the model
    does not take, no layer that fits, a group that does not divide), `OrderError` (quantized or
    sharded already, an optimizer that holds the weights), `NumericsError` (NaN in weights or
    activations with the layer's name, a budget that is not met with the layers to blame),
    `CapacityError` (the original weights wait on the disk until all is done, and do not fit).
    """

    def ask() -> Request:
        _check(model, config, objective, metric, budget, data)
        batches = None if data is None else read_batches(data)
        sites = find_sites(model, filter)
        targets = _targets(config, sites, batches is not None)
        _check_optimizer(optimizer, targets)
        report = QuantizationReport(decisions=decisions if decisions is not None else Decisions())
        if filter is None:
            report.left_over = left_over(model, sites)
            report.notes += notes_of_method(model, config, targets, report.left_over)
        report.notes += notes_of_adapters(model, targets)
        check_suited(model, config, targets, report.left_over)
        return Request(model, config, targets, batches, objective, metric, budget, report)

    alone = data is None and metric is None and objective == "size"
    _all_or_nothing(begun_alike(ask, alone=alone), optimizer)
    return model


def dequantize_(model: Model) -> Model:
    """Turns quantized layers back into plain ones, in place; returns the model.

    Their weights are what the codes stand for, in the type that the weights had: what rounding lost
    stays lost; biases that were corrected and channels that were scaled (in two layers, which
    leaves the outputs) stay so; batch norms that were folded are such again. Parameters are new:
    build optimizers afterwards. They take gradients where the weights did when they were quantized:
    freeze again what was frozen since. Raises `OrderError` where nothing is quantized.
    """
    check_module(model, "lz.dequantize_")
    layers = quantized_layers(model)
    if not layers and not folded_batch_norms(model):
        raise OrderError("lz.dequantize_: no layer of this model is quantized")
    made: dict[int, nn.Parameter] = {}
    # It may be trained later, whatever mode the caller is in.
    with held_interrupts(), torch.inference_mode(False), torch.no_grad():
        biased = [key for key, x in layers.items() if x.bias is not None and not x.had_bias]
        for layer in layers.values():
            key = id(layer.weight)
            if key not in made:
                made[key] = _parameter(layer)
            layer.give_back(made[key])
        unfold_batch_norms_(model)
        if added := [name for name in biased if layers[name].bias is not None]:
            _LOG.warning(
                "lz.dequantize_: %d layers keep a bias that calibration gave them ('%s' is the "
                "first): a model that is built anew has none there, and transformers' "
                "from_pretrained drops it; with bias_correction=False there is none",
                *(len(added), added[0]),
            )
        for module in model.modules():  # a part may have been quantized by itself
            ledger.forget(module, "quantize_")
            module.__dict__.pop(REPORT, None)
        take_nested(model)
        forget_form(model)
    return model


def _parameter(layer: QuantizedLayer) -> nn.Parameter:
    return nn.Parameter(layer.weight.decode(), layer.trains)


def _all_or_nothing(request: Request, optimizer: torch.optim.Optimizer | None) -> None:
    """Does what `request` asks for; whatever fails, or where nothing is kept, undoes it."""
    model = request.model
    before = {id(p): name for name, p in model.named_parameters()}
    found = [*request.report.notes]  # they hold whatever becomes of the layers
    # To the end: what `quiet` put back is put right behind it.
    with held_interrupts():
        weights = {id(site.parameter) for site, _ in request.targets.values()}
        with quiet(model), Spill() as spill, as_it_was(model, spill, weights) as journal:
            try:
                slower = _quantize(request, journal, spill)
                here = {id(p) for p in model.parameters()}
                _refuse_lost(optimizer, {key: x for key, x in before.items() if key not in here})
                let_in()
            except BaseException:
                with held_interrupts():
                    journal.undo()
                raise
            if quantized_layers(model) and not slower:
                ledger.record(model, "quantize_")
            else:
                journal.undo()
                sites = {site.name: site for site, _ in request.targets.values()}
                bits = {name: 8 * site.nbytes / site.numel for name, site in sites.items()}
                request.report.undone(slower, bits)
                request.report.notes += found
            model.__dict__[REPORT] = request.report
        request.report.bytes_after = _bytes(model)  # without what calibration left in buffers
        leave_nested(model)


def _quantize(request: Request, journal: Journal, spill: Spill) -> str:
    """Does it; why it should be undone all the same, or nothing."""
    model, batches, metric = request.model, request.batches, request.metric
    report = request.report
    spill.need(sum({id(s): s.nbytes for s, _ in request.targets.values()}.values()), "quantizing")
    report.bytes_before = _bytes(model)
    seen = False  # whether errors of the outputs can be measured
    if batches is not None:
        outputs = tensors_of(first_call(model, batches[0]))
        seen = bool(outputs)
        spill.put("outputs", outputs)
        del outputs
        report.seconds_before = _seconds(model, batches[0])
    if request.budget is not None and metric is None and not seen:
        raise ConfigError(
            "budget: the model's outputs hold no floating-point tensor to compare; give metric="
        )
    report.metric_name = "metric" if metric is not None else "error of the outputs"
    report.quality_before = agreed(lambda: _rated(metric, model)) if metric is not None else 0.0
    work = Work(request, journal, spill)
    # Compiled blocks would go past the hooks and the replaced forwards that calibration needs.
    with uncompiled():
        work.run()
    work.conv_outputs.decide()

    def measured() -> float | None:
        if metric is not None:
            return _rated(metric, model)
        assert batches is not None
        wanted, found = spill.get("outputs"), tensors_of(_quantized_call(model, batches[0]))
        if request.budget is None:
            need_finite(wanted, found, report)
        return output_difference(wanted, found)

    def measure() -> float | None:
        return agreed(measured)

    if metric is not None or seen:
        report.quality_after = measure()
        if report.quality_after is None:
            report.notes.append(
                "the shapes of the model's outputs depend on values, and are others now: not "
                "comparable; metric= measures such a model"
            )
        if quantized_layers(model):  # else all is undone, folded norms too
            check_budget(request, measure, journal, rescaled=work.scaling.done, folded=work.folded)
    if batches is not None:
        report.seconds_after = _seconds(model, batches[0])
        if request.objective == "speed" and quantized_layers(model):
            return _slower(model, batches[0], report)
    return ""


def _quantized_call(model: nn.Module, batch: Batch) -> Any:
    """`call`, where the float model took the batch."""
    try:
        return call(model, batch)
    except (LeZeroError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else ""
        raise ConfigError(
            "lz.quantize_: the model ran on the first batch, and does not once it is quantized: "
            f"{why or type(error).__name__}. Code of its own may ask a layer for what only the "
            "float one has, as next(layer.parameters()) does: leave that layer out with filter=. "
            "The model is as it was"
        ) from error


def _slower(model: nn.Module, batch: Batch, report: QuantizationReport) -> str:
    """What to say where the model as a whole has become slower."""
    assert report.seconds_before is not None
    assert report.seconds_after is not None
    if report.seconds_after > report.seconds_before * (1 + _WHOLE_MARGIN):
        report.seconds_after = min(report.seconds_after, _seconds(model, batch))
    before, after = report.seconds_before, report.seconds_after
    topic, forms = "quantize the model", ("as it was", "quantized")
    chosen = report.decisions.choose(
        topic,
        {forms[0]: lambda: before * (1 + _WHOLE_MARGIN), forms[1]: lambda: after},
        why="one batch, before (and the spread of two runs) and after",
    )
    if chosen != forms[0]:
        return ""
    return (
        "the model as a whole was not faster, so every layer is as it was; what is above was "
        "measured of the layers by themselves"
    )


def _targets(config: Scheme, sites: list[Site], has_data: bool) -> dict[str, tuple[Site, Target]]:
    """What each layer becomes, by the names of all that use a weight."""
    method = methods.get(config.recipe().method)()
    if method.needs_data and not has_data:
        raise ConfigError(
            f"lz.quantize_: method '{config.recipe().method}' needs calibration data; give data=, "
            "or take 'nearest' or 'hqq'"
        )
    recipe = config.recipe()
    for name in ("bias_correction", "smooth"):
        asked = getattr(recipe, name)
        if not has_data and asked not in (None, False, "auto"):
            raise ConfigError(
                f"{name}: got {asked!r}, which needs calibration data; give data=, or leave it out"
            )
    found: dict[str, tuple[Site, Target]] = {}
    for site in sites:
        target = config.target(site)
        if target is None:
            continue
        found.update({user.name: (site, target) for user in site.users})
    kind = type(config).__name__
    if not found:
        kinds = sorted({type(site.users[0].module).__name__ for site in sites})
        raise ConfigError(
            f"lz.quantize_: {kind} takes none of the layers that there are to quantize "
            f"({', '.join(kinds)}). Convolutions and single embeddings take 8 bits, as in "
            "lz.Int8Weight() and lz.Int8WeightActivation(), the vocabulary's matrices what "
            "vocabulary= says"
        )
    if not has_data and all(target.activations == "tensor" for _, target in found.values()):
        raise ConfigError(
            f"lz.quantize_: {kind} needs calibration data for these layers' inputs; give data="
        )
    return found


def _check(model: Any, config: Any, objective: Any, metric: Any, budget: Any, data: Any) -> None:
    check_module(model, "lz.quantize_")
    if not isinstance(config, Scheme):
        raise ConfigError(
            f"config: got {config!r}, allowed are Int8Weight(…), Int8WeightActivation(…), "
            "Int4Weight(…), Fp8(…) and Nf4(…)"
        )
    if objective not in ("speed", "size"):
        raise ConfigError(f"objective: got {objective!r}, allowed are 'speed' and 'size'")
    if metric is not None and not callable(metric):
        raise ConfigError(f"metric: got {metric!r}, allowed is a function of the model")
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 0:
            raise ConfigError(f"budget: got {budget!r}, allowed is a number of at least 0")
        if metric is None and data is None:
            raise ConfigError("budget: nothing can be measured; give metric= or data=")
    if any(isinstance(module, QuantizedLayer) for module in model.modules()):
        raise OrderError(
            "lz.quantize_: this model is quantized already; start from the original weights, or "
            "call lz.dequantize_ first"
        )
    if any("shard_" in ledger.applied(module) for module in model.modules()):
        raise OrderError(
            "lz.quantize_: this model went through lz.shard_, and the shards are what training "
            "needs; quantize the saved model instead"
        )


def _check_optimizer(
    optimizer: torch.optim.Optimizer | None, targets: dict[str, tuple[Site, Target]]
) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: got {optimizer!r}, allowed is a torch optimizer")
    # Corrected biases and folded batch norms leave it too: that is known at the end.
    _refuse_lost(optimizer, {id(site.parameter): name for name, (site, _) in targets.items()})


def _refuse_lost(optimizer: torch.optim.Optimizer | None, leaving: dict[int, str]) -> None:
    """`OrderError` where the optimizer holds parameters that leave the model, by their names."""
    if optimizer is None:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lost = [name for key, name in leaving.items() if key in held]
    if lost:
        raise OrderError(
            f"lz.quantize_: the optimizer holds {len(lost)} of the parameters that leave the model "
            f"('{lost[0]}' is the first); build it afterwards, over what is left in "
            "model.parameters()"
        )


def _rated(metric: Metric, model: nn.Module) -> float:
    # It may leave the model in training mode, as code that measures in mid-training does.
    with passed_on_at(1), evaluating(model, OWN_STATISTICS):
        value: Any = metric(model)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"metric: gave {' '.join(repr(value).split())[:60]}, allowed is one number, the lower "
            "the better"
        ) from None
    if not math.isfinite(number):
        raise NumericsError(f"metric: gave {number} for the model, allowed is a finite number")
    return number


def _bytes(model: nn.Module) -> int:
    tensors = {id(x): x for x in [*model.parameters(), *model.buffers()]}
    return sum(map(nbytes, tensors.values()))


def _seconds(model: nn.Module, batch: Batch) -> float:
    """The best of some runs on one batch."""
    return of_the_whole(batch, [lambda own: given(model, own)], device.places(model))[0]
