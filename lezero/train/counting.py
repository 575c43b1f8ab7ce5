"""What a loss is counted in: tokens or samples.

The engine weights every micro-batch and every rank by its number of counted units, so that
accumulation over unequal batches equals one big batch exactly. `tokens` counts the `targets` other
than -100, or else the `labels` other than -100 (all of them where they are floating-point: there
-100 is a value like any other; other than its config's `semantic_loss_ignore_index` where the loss
is that of a model of transformers that segments images), which are a tensor or an array; `samples`
counts the first dim, whatever is inside the entries of `targets` or `labels` that are a list of as
many; anything else is a function `count(batch) -> int`.

`labels` of shape (batch, tokens) mean two things: causal language models of transformers shift them
by one, so that the first column never counts, and all other models do not. No name tells which
(`BartForCausalLM` does not shift), so the model is asked, once, before its first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lezero.core.errors import ConfigError, LeZeroError
from lezero.nn.wrappers import unwrapped
from lezero.ops.cross_entropy.reference import IGNORED
from lezero.train.randomness import seeded

Batch = Any
Count = Callable[[Batch], int]
_NAMES = ("auto", "tokens", "samples")


class Counter:
    """Counts the units of a batch: by "auto", "tokens", "samples", or the user's own function.

    model: the one whose own loss it is, if it is one's own: its config says what that leaves out.
    shifted: whether the model shifts `labels` of shape (batch, tokens); None: not asked yet.
    """

    def __init__(self, counted: str | Count, model: nn.Module | None = None) -> None:
        if not callable(counted) and counted not in _NAMES:
            raise ConfigError(
                f"counted: got {counted!r}, allowed is {', '.join(_NAMES)} or a function"
            )
        self.counted = _of_ctc(model) or counted if counted == "auto" else counted
        self.ignored = _ignored_by(model)
        self.shifted: bool | None = None

    def __call__(self, batch: Batch) -> int:
        if callable(self.counted):
            return _whole(self.counted(batch))
        if self.counted == "samples" or (self.counted == "auto" and not _values_by_token(batch)):
            return samples(batch)
        return self._count_tokens(batch)

    def must_ask(self, batch: Batch) -> bool:
        """Whether `ask` has to be called before this batch can be counted."""
        named = self.counted in ("auto", "tokens") and self.shifted is None
        return named and _labels_by_token(batch) is not None

    @torch.no_grad()
    def ask(self, loss: Callable[[Batch], torch.Tensor], batch: Batch) -> bool:
        """Finds out whether the model shifts: whether a label in the first column changes its loss.

        Two forward passes, which draw the same numbers: with a label in the first column alone, and
        with none at all. A model that shifts gives the same twice (NaN, zero, or what else it adds
        to the loss). Raises `ConfigError` when it cannot be called so.
        """

        def drawn(given: Batch) -> torch.Tensor:
            with seeded(0, 0, 0):
                return loss(given)

        labels, given = _labels_by_token(batch), batch["labels"]
        assert labels is not None

        def as_given(values: torch.Tensor) -> Any:
            return values if isinstance(given, torch.Tensor) else values.numpy().astype(given.dtype)

        nothing = torch.full_like(labels, IGNORED)
        first = nothing.clone()
        first[:, :1] = labels.amax().clamp(min=0) if labels.numel() else 0
        try:
            with_first, without = (
                float(drawn({**batch, "labels": as_given(each)})) for each in (first, nothing)
            )
        except LeZeroError:
            raise
        except Exception as error:
            where = f"labels are {IGNORED}"
            if "device-side assert" in str(error):  # after which the device runs nothing more
                where += ", or on the whole batch: this process can ask its device no more"
            else:
                with torch.enable_grad():  # a loss may need gradients of its own
                    drawn(batch)  # a model that fails on its own batch says so itself
            raise ConfigError(
                "counted: whether the model shifts 'labels' by one could not be found out, since "
                f"its loss fails where {where} ({type(error).__name__}: {error}). Say what the "
                "loss is the mean over: counted='samples' or a function count(batch)"
            ) from error
        both_nan = with_first != with_first and without != without
        self.shifted = both_nan or abs(with_first - without) <= 1e-6 * abs(without)
        return self.shifted

    def _count_tokens(self, batch: Batch) -> int:
        found = _values_by_token(batch)
        if found is None:
            raise ConfigError(
                f"counted in tokens, but {_why_no_tokens(batch)}; use counted='samples' or give a "
                "function count(batch) -> int"
            )
        values, by_token = found[1], _labels_by_token(batch)
        if by_token is not None:
            assert self.shifted is not None, "the model was not asked whether it shifts"
            values = by_token[:, 1:] if self.shifted else by_token
        return _not_ignored(values, self.ignored)


def _ignored_by(model: nn.Module | None) -> int | None:
    """The label that a model's own loss leaves out: those that segment images may leave out 255,
    but with one class their mean is over all pixels."""
    config = _config_of(model, "ForSemanticSegmentation")
    if getattr(config, "num_labels", None) == 1:
        return None
    named = (getattr(config, f"{kind}loss_ignore_index", None) for kind in ("semantic_", ""))
    return next((index for index in named if isinstance(index, int)), IGNORED)


def _of_ctc(model: nn.Module | None) -> str | None:
    """What the CTC loss of a model of transformers is the mean over; None for another loss.
    `ConfigError` for one that is a sum."""
    reduction = getattr(_config_of(model, "ForCTC"), "ctc_loss_reduction", None)
    if reduction == "sum":
        raise ConfigError(
            "counted: the loss of this model is a sum over the samples (config.ctc_loss_reduction "
            "is 'sum'), and no mean; set model.config.ctc_loss_reduction = 'mean' for a mean over "
            "samples, or say what the loss is the mean over: counted='samples' or a function"
        )
    return reduction and "samples"  # torch takes the mean over the samples of each one's mean


def _config_of(model: nn.Module | None, kind: str) -> Any:
    """The config of a model of transformers whose class ends in `kind`, also within a wrapper: not
    of a part of another model, which has a loss of its own."""
    while model is not None and not type(model).__name__.endswith(kind):
        model = _inside(model)
    return getattr(model, "config", None)


def _inside(model: nn.Module) -> nn.Module | None:
    """What a wrapper calls and returns the outputs of."""
    if (inner := unwrapped(model)) is not model:
        return inner
    if isinstance(model, nn.Sequential) and len(model) == 1:
        return model[0]
    # Also where FSDP2 made a class of it, which says that it is torch's.
    if any(kind.__module__.split(".")[0] == "peft" for kind in type(model).__mro__):
        return model._modules.get("base_model") or model._modules.get("model")
    return None


def _not_ignored(values: Any, ignored: int | None) -> int:
    """How many entries of a tensor or array carry loss; none is ignored where its type cannot hold
    that label (torch would take 156 for -100 among those of 8 bits without a sign)."""
    limits = torch.iinfo if isinstance(values, torch.Tensor) else np.iinfo
    try:
        kind = limits(values.dtype)
    except (TypeError, ValueError):  # fractions, or true and false
        return math.prod(values.shape)
    held = ignored is not None and kind.min <= ignored <= kind.max
    return int((values != ignored).sum()) if held else math.prod(values.shape)


def _whole(given: Any) -> int:
    """What a user's function counted; `ConfigError` unless it is a whole number from 0."""
    try:
        count = int(given)
        if count == given and count >= 0:
            return count
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise ConfigError(
        f"counted: the function returned {given!r:.80}, allowed is a whole number from 0 (weights "
        "that are fractions count when they are scaled up: round(float(sum) * 2**20))"
    )


def _values_by_token(batch: Batch) -> tuple[str, Any] | None:
    """The `targets`, or else the `labels`, that can be counted, and which of the two they are.
    Lists, texts and records may be anything."""
    for name in ("targets", "labels") if isinstance(batch, Mapping) else ():
        if isinstance(values := batch.get(name), torch.Tensor | np.ndarray):
            return name, values
    return None


def _why_no_tokens(batch: Batch) -> str:
    for name in ("targets", "labels") if isinstance(batch, Mapping) else ():
        if name in batch:
            kind = type(batch[name]).__name__
            return f"its '{name}' are a {kind}, allowed is a tensor or an array"
    return "the batch has neither 'targets' nor 'labels'"


def _labels_by_token(batch: Batch) -> torch.Tensor | None:
    """The labels (B,T) of which the first column may or may not count, in a type that holds -100.
    True and False are no tokens."""
    name, labels = _values_by_token(batch) or ("", None)
    if isinstance(labels, np.ndarray) and labels.dtype.kind == "i":
        labels = torch.from_numpy(labels.astype(np.int64))
    if name != "labels" or not isinstance(labels, torch.Tensor):
        return None
    if labels.ndim != 2 or labels.is_floating_point() or labels.dtype == torch.bool:
        return None
    return labels if labels.dtype.is_signed else labels.long()


def why_nothing(micros: list[Batch]) -> str:
    """What to say when no unit of these micro-batches counts, nor of those of other ranks."""
    rows = [len(tensor) for micro in micros for _, tensor in _tensors(micro, "")]
    if rows and not any(rows):
        return "it has no samples"
    return "every target is masked, on every rank"


def samples(batch: Batch) -> int:
    """The number of rows, which every tensor of the batch has (those without dims aside)."""
    first: tuple[str, int] | None = None
    for name, tensor in _tensors(_without_records(batch), ""):
        rows = tensor.shape[0]
        if first is None:
            first = name, rows
        elif rows != first[1]:
            raise ConfigError(
                f"the tensors of the batch have different first dims: {first[0]} has {first[1]}, "
                f"{name} has {rows}, so it has no number of samples and cannot be cut into "
                "micro-batches. Keep what is not one row a sample out of the batch, or give "
                "counted=function and, where accumulate is above 1, a list of ready-made "
                "micro-batches"
            )
    if first is None:
        raise ConfigError(
            f"the batch, a {type(batch).__name__}, has no tensor with a batch dim to count samples "
            "in. Dicts, lists and tuples are looked into, dataclasses and other objects are not: "
            "give a dict or a named tuple"
        )
    return first[1]


def _without_records(batch: Batch) -> Batch:
    """Without the lists of `targets` or `labels` that have an entry for each row of the tensors
    beside them: tensors in an entry, such as the boxes in one image, have rows of their own."""
    if not isinstance(batch, Mapping):
        return batch
    lists = {name for name in ("targets", "labels") if isinstance(batch.get(name), list)}
    beside = {key: value for key, value in batch.items() if key not in lists}
    rows = {len(tensor) for _, tensor in _tensors(beside, "")} if lists else set()
    short = {name: batch[name] for name in lists if rows != {len(batch[name])}}
    return {**beside, **short} if len(short) < len(lists) else batch


def _tensors(batch: Batch, name: str) -> list[tuple[str, torch.Tensor]]:
    """(where it is, tensor) of all tensors with a first dim."""
    if isinstance(batch, torch.Tensor):
        return [(name or "the batch", batch)] if batch.ndim else []
    items: list[tuple[Any, Any]] = []
    if isinstance(batch, Mapping):
        items = list(batch.items())
    elif isinstance(batch, list | tuple):
        items = list(enumerate(batch))
    return [
        found
        for key, value in items
        for found in _tensors(value, f"{name}[{key!r}]" if name else repr(key))
    ]
