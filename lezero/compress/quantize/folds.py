"""Which module before a layer can take a division of the layer's input channels.

Multiplying input channels of layers and dividing the outputs of what comes before them by the same
numbers changes nothing, if no one else reads those outputs and nothing in between mixes channels: a
norm before projections, the value before the output projection, the up before the down projection.
Nothing is assumed of the architecture: a pair is tried, by powers of two, which floating point
multiplies without rounding (fp16 nearly so), and taken when on every calibration batch the outputs
stay, the layers are given their inputs divided by just these numbers, and every other layer with
weights is given what it was given before. The last two hold for layers too whose part in the
outputs is nothing (an expert that no token chose).

Both modules are in one repeated block, whose outputs are what must stay. Elsewhere it would not be
enough that the model's outputs stay: what the last norm gives to a head is what others read as the
model's hidden states, or as a text's embedding. That nothing else reads what lies within the block,
or its weights, is seen before (`leaks.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from lezero.compress.quantize.evidence import Evidence, Given, gather, outliving
from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.journal import mode_of
from lezero.compress.quantize.sites import Site, kind_of
from lezero.compress.quantize.tensors import is_dense, overlaps

_TRIES = 6
_TOLERANCE = 1e-5
# Trials of a pair: the scales, large so that a wrong pair shows however little it adds to the
# outputs, and what a right one may change.
_TRIALS = (((1 / 16, 16.0), _TOLERANCE),)
# In fp16 small weights lose digits when they are divided, and a right pair may change 1e-3 of a
# token's largest output. Signs lose nothing, so another reader of the outputs shows by them; what
# gives a sign on but not a size (a bend, a norm in between) changes far more than 2⁻⁸.
_TRIALS_FP16 = (((-1.0, 1.0), _TOLERANCE), ((1 / 4, 4.0), 2.0**-8))


@dataclass(eq=False)
class Fold:
    """`producer`'s output channels are the input channels of `sites`, and of nothing else."""

    producer: nn.Module
    sites: tuple[Site, ...]
    inputs: Inputs
    parameters: list[nn.Parameter] = field(init=False)
    """Of the producer and the sites: a layer that is quantized has none any more."""

    def __post_init__(self) -> None:
        own = producer_parameters(self.producer)
        self.parameters = [*own, *(site.parameter for site in self.sites)]


def find_folds(
    groups: list[tuple[Inputs, tuple[Site, ...]]],
    calls: list[nn.Module],
    private: Collection[int],
    chosen: Collection[int],
    run: Callable[[], list[Tensor]],
) -> list[Fold]:
    """The fold of each group of linear layers that share their inputs, where there is one.

    calls: modules in the order in which they were called. private: ids of the parameters that are
    in one place of the model only. chosen: ids of the layers that are to be quantized: of linear
    layers only these are written to. run: the outputs of the block that holds them; without tensors
    nothing is proved.
    """
    if not groups:
        return []
    with outliving(calls) as kept:
        before = gather(calls, run)
        before = Evidence(copied(before.outputs), before.given)
    if not _same(before.outputs, run()):
        return []  # outputs that do not repeat prove nothing
    found = []
    for inputs, sites in groups:
        layers = [site.users[0].module for site in sites]
        if not all(id(site.parameter) in private for site in sites):
            continue
        if any((layer, "input") in kept for layer in layers):
            continue
        if not all(any(x.any() for x in before.given.get(layer, ())) for layer in layers):
            continue  # inputs of zeros stay what they are whatever they are divided by
        K = sites[0].weight().shape[1]
        tried = 0
        for producer in reversed(calls[: min(map(calls.index, layers))]):
            if _width(producer) != K or tried == _TRIES:
                continue
            if kind_of(producer) == "linear" and id(producer) not in chosen:
                continue
            if not all(id(p) in private for p in producer_parameters(producer)):
                continue
            if (producer, "output") in kept:
                continue
            tried += 1
            fold = Fold(producer, sites, inputs)
            if _holds(fold, before, run):
                found.append(fold)
                break
    return found


def still_holding(
    folds: list[Fold], before: Evidence, run: Callable[[], list[Tensor]]
) -> list[Fold]:
    """Those of `folds` that hold on another batch too. before: with outputs in memory that a run
    does not write to. One after the other, since a trial holds the weights of its layers twice."""
    return [fold for fold in folds if _holds(fold, before, run)]


def copied(tensors: list[Tensor]) -> list[Tensor]:
    """In memory of their own: a block may work in place, and give out what it was given."""
    return [tensor.clone() for tensor in tensors]


@torch.no_grad()
def scale_channels(fold_producer: nn.Module, sites: tuple[Site, ...], s_K: Tensor) -> None:
    """Divides the producer's outputs by `s_K` and multiplies the sites' inputs by it, in memory of
    their own: what else reads the old values, whoever holds them, has them still."""
    for parameter in producer_parameters(fold_producer):
        transposed = type(fold_producer).__name__ == "Conv1D" and parameter.dim() == 2
        with mode_of(parameter):
            parameter.data = parameter.data.clone()
            rows = parameter.data.T if transposed else parameter.data
            rows.div_(s_K.view(-1, *[1] * (rows.dim() - 1)))
    for site in sites:
        with mode_of(site.parameter):
            site.parameter.data = site.parameter.data.clone()
            site.weight().mul_(s_K)
    torch.clear_autocast_cache()  # it holds weights as they were


def producer_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Weight and bias: of a norm (K,), of a linear layer (K, …)."""
    return [p for name, p in module._parameters.items() if p is not None]


def _width(module: nn.Module) -> int | None:
    """Output channels of a norm or a linear layer; None for anything else."""
    weight = module._parameters.get("weight")
    if weight is None or set(module._parameters) - {"weight", "bias"}:
        return None
    if kind_of(module) == "linear":
        return weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
    return len(weight) if weight.dim() == 1 else None


def in_one_place(model: nn.Module) -> set[int]:
    """Ids of the parameters that one module has, which is itself in one place of the model and not
    `hooked`, and whose values can be written to."""
    count = Counter(
        id(parameter)
        for _, module in model.named_modules(remove_duplicate=False)
        for parameter in ({} if hooked(module) else module._parameters).values()
        if parameter is not None and is_dense(parameter) and not overlaps(parameter)
    )
    return {key for key, places in count.items() if places == 1}


def hooked(module: nn.Module) -> bool:
    """Whether code that was hung on it sees what it is given, or what it gives."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _holds(fold: Fold, before: Evidence, run: Callable[[], list[Tensor]]) -> bool:
    """Whether outputs and inputs are as they should be when `fold` is made with the scales of the
    trials."""
    trials = _TRIALS_FP16 if fold.sites[0].parameter.dtype == torch.float16 else _TRIALS
    return all(_passes(fold, scales, before, run, within) for scales, within in trials)


def _passes(
    fold: Fold,
    scales: tuple[float, float],
    before: Evidence,
    run: Callable[[], list[Tensor]],
    within: float,
) -> bool:
    """Whether `fold` holds with each channel scaled by one of two numbers."""
    weight = fold.sites[0].weight()
    mine = torch.Generator("cpu").manual_seed(0)
    chosen = torch.randint(0, 2, (weight.shape[1],), generator=mine, device="cpu")
    s_K = torch.tensor(scales, dtype=torch.float32, device="cpu")[chosen].to(weight.device)
    kept = [(parameter, parameter.data) for parameter in fold.parameters]
    try:
        scale_channels(fold.producer, fold.sites, s_K)
        after = gather(before.given, run)
    finally:
        for parameter, values in kept:
            with mode_of(parameter):
                parameter.data = values
        torch.clear_autocast_cache()
    same = _same(before.outputs, after.outputs, within)
    return same and _reaches_only(fold, s_K, before.given, after.given, within)


def _reaches_only(fold: Fold, s_K: Tensor, before: Given, after: Given, within: float) -> bool:
    """Whether the fold's layers were given their inputs divided by `s_K`, and all others theirs."""
    divided = {site.users[0].module for site in fold.sites}
    for layer, xs in before.items():
        ys = after[layer]
        if layer in divided and len(xs) == len(ys):
            ys = [y.float() * s_K for y in ys]
            xs = [x.float() for x in xs]
        if len(xs) != len(ys) or not all(map(partial(near, tolerance=within), xs, ys)):
            return False
    return True


def _same(before: list[Tensor], after: list[Tensor], tolerance: float = _TOLERANCE) -> bool:
    if not before or len(before) != len(after):
        return False
    return all(near(one, two, tolerance) for one, two in zip(before, after, strict=True))


def near(
    one: Tensor, two: Tensor, tolerance: float = _TOLERANCE, *, per_sample: bool = False
) -> bool:
    """Whether no element differs by more than `tolerance` times the largest of its token (along the
    last dim) or sample (index of dim 0). Tokens with massive values would hide all others; what is
    not finite in both has to be the same. Of integers, that share of them may be others: what they
    are made of has crossed a threshold."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.numel():
        return True
    if not one.is_floating_point():
        return int((one != two).sum()) <= tolerance * one.numel()
    dims = tuple(range(1, one.dim())) if per_sample else (-1,)
    most = one.abs().where(one.isfinite(), 0.0).amax(dims, keepdim=True)
    same = (one == two) | (one.isnan() & two.isnan())
    return bool((same | ((one - two).abs() <= tolerance * most)).all())
