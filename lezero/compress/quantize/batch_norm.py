"""Batch norms multiplied into the convolutions before them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.batches import Batch, call, comparable, first_call
from lezero.compress.quantize.folds import hooked, near
from lezero.compress.quantize.journal import Journal, mode_of
from lezero.compress.quantize.readers import Readers
from lezero.compress.quantize.sites import kind_of
from lezero.compress.quantize.spill import Spill

FOLDABLE = (nn.BatchNorm1d, nn.BatchNorm2d)
_PARAMETERS = ("weight", "bias")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_WAS, _CONV_BIAS = "was_", "was_conv_bias"


class FoldedBatchNorm(nn.Identity):
    """Stands where a batch norm was that is part of the convolution before it now.

    What that had is kept for `unfold_batch_norms_`, as buffers with "was_" before their names, and
    as "was_conv_bias" what the convolution had; besides `float_class`, `trains` (which parameters
    took gradients) and `conv`, in a tuple, so that it is no part of this module.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"'{name}': this batch norm is part of the convolution before it since "
                "lz.quantize_; where the model reads its values, quantize with "
                "fold_batch_norm=False"
            ) from None


def fold_batch_norms_(
    model: nn.Module,
    batches: list[Batch],
    chosen: Collection[int],
    private: Collection[int],
    journal: Journal,
    spill: Spill,
) -> list[tuple[nn.Module, nn.Module]]:
    """Folds every batch norm that alone reads a convolution's outputs; both modules, in pairs.

    chosen: ids of the convolutions that are to be quantized; others stay as they are. private: ids
    of the parameters that are in one place of the model only; a convolution that shares one with
    another keeps it.

    In eval mode a batch norm multiplies each channel by a = γ / √(σ² + ε) and adds β - a μ (Jacob
    et al., 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-
    Only Inference", arXiv:1712.05877, equation 14), so w → a w and b → a (b - μ) + β. `readers.py`
    watches over all batches that nothing else reads the convolution; and a pair is kept only if the
    outputs of all batches stay. A path that no batch takes is not seen: where it reads the
    convolution without the batch norm, it reads other values afterwards.
    """
    pairs = [
        (conv, norm)
        for conv, norm in _pairs(model, batches, spill)
        if id(conv) in chosen
        and all(id(parameter) in private for parameter in conv.parameters())
        and _can_come_back(conv, norm)
    ]

    def stays(index: int, tolerance: float) -> bool:
        before = spill.get(("before folding", index))
        try:
            after = comparable(call(model, batches[index]))
        except AttributeError:  # it reads the batch norm's attributes, which are gone
            return False
        if not before or len(before) != len(after):
            return False
        pairs = zip(before, after, strict=True)
        return all(near(*pair, tolerance, per_sample=True) for pair in pairs)

    def folded(some: list[tuple[Any, Any]]) -> bool:
        kept = [_fold(conv, norm, journal) for conv, norm in some]
        # Folded weights are rounded anew.
        tolerance = 1e-3 if some[0][0].weight.dtype == torch.float32 else 0.05
        same = all(stays(index, tolerance) for index in range(len(batches)))
        if not same:
            for (conv, norm), own in zip(some, kept, strict=True):
                _unfold(conv, norm, *own)
        return same

    # Most models have nothing but such pairs; only then is it one run.
    done = pairs if not pairs or folded(pairs) else [pair for pair in pairs if folded([pair])]
    for index in range(len(batches)):
        spill.drop(("before folding", index))
    return done


def _pairs(model: nn.Module, batches: list[Batch], spill: Spill) -> list[tuple[Any, Any]]:
    """Convolutions with the batch norms that alone read them; what the model gives for each batch
    goes to `spill`."""
    convs = [module for module in model.modules() if kind_of(module) == "conv"]
    norms = [module for module in model.modules() if _is_foldable(module)]
    readers = Readers(convs, norms)
    for index, batch in enumerate(batches if convs and norms else []):
        with readers.watching() as given_out:
            outputs = first_call(model, batch, index)
            given_out(outputs)
        spill.put(("before folding", index), comparable(outputs))
        if not readers.pairs():
            break
    return readers.pairs()


def _is_foldable(module: nn.Module) -> bool:
    """A batch norm of the plain kind that computes with the statistics that it keeps."""
    plain = type(module) in FOLDABLE and "forward" not in module.__dict__ and not hooked(module)
    return plain and module.running_mean is not None and not module.training


@torch.no_grad()
def _can_come_back(conv: Any, norm: Any) -> bool:
    """Whether no channel is multiplied by 0, or by so little that its weight would be lost."""
    most = conv.weight.float().flatten(1).abs().amax(1)
    own, wide = torch.finfo(conv.weight.dtype), torch.finfo(torch.float32)
    least = 128 * max(own.tiny * own.eps, wide.tiny)  # what a code counts for is a number still
    return bool(((most * _factor(norm).abs() >= least) | (most == 0)).all())


@torch.no_grad()
def _fold(conv: Any, norm: Any, journal: Journal) -> tuple[Tensor, nn.Parameter | None, Any, Any]:
    journal.remember(conv)
    journal.remember(norm)
    journal.save_values(conv.weight)
    kept = (conv.weight.data, conv.bias, type(norm), dict(norm.__dict__))
    bias = _folded_bias(conv.bias, norm).to(conv.weight.dtype)
    _multiply(conv, _factor(norm))
    trains = (conv.weight if conv.bias is None else conv.bias).requires_grad
    become_folded(norm, conv, conv.bias)
    conv.bias = nn.Parameter(bias, trains)
    return kept


def become_folded(norm: nn.Module, conv: nn.Module | None, bias: Tensor | None) -> None:
    """`norm`, of a class of `FOLDABLE`, becomes a `FoldedBatchNorm`. conv: the convolution that it
    is part of; bias: what that had before."""
    kept: dict[str, Any] = {_CONV_BIAS: None if bias is None else bias.detach().clone()}
    own = norm.__dict__
    trains = [
        name for name in _PARAMETERS if (x := own["_parameters"][name]) is None or x.requires_grad
    ]
    for kind, names in (("_parameters", _PARAMETERS), ("_buffers", _BUFFERS)):
        parts = own[kind] = dict(own[kind])
        for name in names:
            value = parts.pop(name)
            kept[_WAS + name] = None if value is None else value.detach().clone()
    own["_buffers"].update(kept)
    own.update(float_class=type(norm), trains=trains, conv=(conv,))
    norm.__class__ = FoldedBatchNorm


def folded_batch_norms(model: nn.Module) -> list[nn.Module]:
    """Those whose convolution is part of `model` too."""
    held = {id(module) for module in model.modules()}
    return [
        norm
        for norm in model.modules()
        if isinstance(norm, FoldedBatchNorm) and id(norm.__dict__["conv"][0]) in held
    ]


@torch.no_grad()
def unfold_batch_norms_(model: nn.Module) -> None:
    """Batch norms that were folded are such again, as they were, behind convolutions that are no
    longer quantized: with w' as it is w = w' / a. What was added to b' since (a corrected bias) is
    added to β, or where there is none taken off μ."""
    for norm in folded_batch_norms(model):
        conv: Any = norm.__dict__["conv"][0]
        if conv.bias is not None and isinstance(conv.weight, nn.Parameter):
            _become_batch_norm(norm, conv)


def _become_batch_norm(norm: Any, conv: Any) -> None:
    own = norm.__dict__
    bias, trains = own["_buffers"].pop(_CONV_BIAS), own["trains"]
    for kind, names in (("_parameters", _PARAMETERS), ("_buffers", _BUFFERS)):
        parts = {name: own["_buffers"].pop(_WAS + name) for name in names}
        own[kind] = {**parts, **own[kind]}
    norm.__class__ = own["float_class"]
    for name in ("float_class", "trains", "conv"):
        del own[name]
    added = conv.bias.float() - _folded_bias(bias, norm).to(conv.bias.dtype).float()
    factor = _factor(norm)
    _multiply(conv, 1 / factor)
    conv.bias = None if bias is None else nn.Parameter(bias, conv.bias.requires_grad)
    if norm.bias is not None:
        own["_parameters"]["bias"] = (norm.bias.float() + added).to(norm.bias.dtype)
    else:
        norm.running_mean = (norm.running_mean.float() - added / factor).to(norm.running_mean.dtype)
    for name in _PARAMETERS:
        value = own["_parameters"][name]
        if value is not None:
            own["_parameters"][name] = nn.Parameter(value.clone(), name in trains)


def _folded_bias(bias: Tensor | None, norm: Any) -> Tensor:
    """b' of a convolution with the bias b, or none."""
    mean = norm.running_mean.float()
    b = -mean if bias is None else bias.float() - mean
    return b * _factor(norm) + (0.0 if norm.bias is None else norm.bias.float())


def _factor(norm: Any) -> Tensor:
    gamma = 1.0 if norm.weight is None else norm.weight.float()
    return gamma / (norm.running_var.float() + norm.eps).sqrt()


def _multiply(conv: Any, factor: Tensor) -> None:
    """The weight of each output channel of `conv` by its factor, in memory of its own."""
    width = [1] * (conv.weight.dim() - 1)
    with mode_of(conv.weight):
        scaled = conv.weight.float() * factor.view(-1, *width)
        conv.weight.data = scaled.to(conv.weight.dtype)


def _unfold(
    conv: Any, norm: Any, weight: Tensor, bias: Any, kind: Any, own: dict[str, Any]
) -> None:
    with mode_of(conv.weight):
        conv.weight.data = weight
    conv.bias = bias
    norm.__class__ = kind
    norm.__dict__.clear()
    norm.__dict__.update(own)
