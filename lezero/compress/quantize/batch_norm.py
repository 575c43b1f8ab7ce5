"""Batch norms multiplied into the convolutions before them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.batches import Batch, call, comparable, first_call
from lezero.compress.quantize.folds import near
from lezero.compress.quantize.journal import Journal, mode_of
from lezero.compress.quantize.readers import Readers
from lezero.compress.quantize.sites import kind_of
from lezero.compress.quantize.spill import Spill

FOLDABLE = (nn.BatchNorm1d, nn.BatchNorm2d)
_WAS = "was_"


class FoldedBatchNorm(nn.Identity):
    """Stands where a batch norm was that is part of the convolution before it now. What that had
    is kept for `unfold_batch_norms_`, as buffers with "was_" before their names."""

    float_class: type[nn.Module]
    conv: tuple[nn.Module | None]
    """In a tuple, so that it is no part of this module."""
    had_bias: bool
    """Whether the convolution had one of its own."""

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
        if id(conv) in chosen and all(id(parameter) in private for parameter in conv.parameters())
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
    plain = type(module) in FOLDABLE and "forward" not in module.__dict__
    return plain and module.running_mean is not None and not module.training


@torch.no_grad()
def _fold(conv: Any, norm: Any, journal: Journal) -> tuple[Tensor, nn.Parameter | None, Any, Any]:
    journal.remember(conv)
    journal.remember(norm)
    journal.save_values(conv.weight)
    kept = (conv.weight.data, conv.bias, type(norm), dict(norm.__dict__))
    factor, shift = _factor(norm), 0.0 if norm.bias is None else norm.bias.float()
    bias = (
        -norm.running_mean.float() if conv.bias is None else conv.bias.float() - norm.running_mean
    )
    _multiply(conv, factor)
    trains = (conv.weight if conv.bias is None else conv.bias).requires_grad
    had_bias = conv.bias is not None
    conv.bias = nn.Parameter((bias * factor + shift).to(conv.weight.dtype), trains)
    become_folded(norm, conv, had_bias)
    return kept


def become_folded(norm: nn.Module, conv: nn.Module | None, had_bias: bool) -> None:
    """`norm`, of a class of `FOLDABLE`, becomes a `FoldedBatchNorm`, and `conv` its convolution."""
    parts = {
        name: None if x is None else x.detach().clone() for name, x in norm._parameters.items()
    }
    kept = {_WAS + name: value for name, value in {**parts, **norm._buffers}.items()}
    own = {"float_class": type(norm), "conv": (conv,), "had_bias": had_bias}
    norm.__dict__.update(own, _parameters={}, _buffers=kept)
    norm.__class__ = FoldedBatchNorm


@torch.no_grad()
def unfold_batch_norms_(model: nn.Module) -> None:
    """Batch norms that were folded are such again, before convolutions that are no longer
    quantized: with w' and b' as they are, w = w' / a and b = (b' - β) / a + μ. A convolution that
    had no bias has none again, and μ takes what else may be in b'. Channels with a = 0 keep w', and
    β is their b'."""
    held = set(model.modules())
    for norm in held:
        if isinstance(norm, FoldedBatchNorm) and norm.conv[0] in held:
            _become_batch_norm(norm)


def _become_batch_norm(norm: Any) -> None:
    conv, had_bias = norm.conv[0], norm.had_bias
    own: dict[str, Any] = {name.removeprefix(_WAS): x for name, x in norm._buffers.items()}
    gamma, beta = own.pop("weight"), own.pop("bias")
    kept = norm.__dict__
    norm.__class__ = kept["float_class"]
    for name in ("float_class", "conv", "had_bias"):
        del kept[name]
    kept.update(_parameters={"weight": gamma, "bias": beta}, _buffers=own)
    factor, b = _factor(norm), conv.bias.float()
    none = factor.abs() < torch.finfo(torch.float32).tiny
    factor = torch.where(none, 1.0, factor)
    _multiply(conv, 1 / factor)
    if beta is not None:
        beta = torch.where(none, b, beta.float()).to(beta.dtype)
        b = b - beta.float()
    if had_bias:
        conv.bias.data = (b / factor + norm.running_mean.float()).to(conv.bias.dtype)
    else:
        conv.bias = None
        norm.running_mean = (-b / factor).to(norm.running_mean.dtype)
    trains = conv.weight.requires_grad
    for name, value in (("weight", gamma), ("bias", beta)):
        kept["_parameters"][name] = None if value is None else nn.Parameter(value.clone(), trains)


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
    norm.__dict__.update(own)
