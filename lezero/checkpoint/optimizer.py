"""Optimizer state by parameter name, so that it survives another order or grouping of code.

torch numbers parameters by their position; a model edited between save and resume then silently
gets the momentum of another layer. Here each state tensor is called
`optimizer/<parameter>/<state>`, and a name that does not fit is an error. State that belongs to no
parameter is in `shared_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lezero.checkpoint.inner_optimizers import (
    inner_optimizers,
    inner_prefix,
    inner_to_load,
    is_inner,
    tell_rates,
    warn_of_more,
)
from lezero.checkpoint.masters import MASTERS
from lezero.checkpoint.plain_values import from_json, to_json
from lezero.checkpoint.shared_state import (
    device_of,
    in_file,
    pack_shared,
    put_shared,
    read_shared,
    shared_names,
)
from lezero.core.errors import ConfigError, FileError, OrderError

_DAMAGES = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
"""What reading a damaged document ends in."""
OF_THE_CODE = ("fused", "foreach", "capturable")
"""Options that say how a step is computed, not what has been trained."""
Packed = tuple[dict[str, Tensor], dict[str, Any]]


def pack_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], prefix: str = "optimizer/"
) -> Packed:
    """State tensors by name and a JSON document with groups, options and scalar state.

    `parameters` is `dict(model.named_parameters())`. The tensors are the optimizer's own, not
    copies, but for sparse ones, which are stored dense. Raises `OrderError` when the optimizer
    holds a parameter that the model does not have, and `FileError` for an option or a parameter's
    state that is neither a tensor nor a plain value. State of no parameter that cannot be saved is
    left out, with a warning. Optimizers inside of it (`inner_optimizers`) are packed with it.
    """
    tensors, document = _packed(optimizer, parameters, prefix)
    inner = inner_optimizers(optimizer, parameters)
    if inner:
        document["inner"] = {}
    for where, each in inner.items():
        found, document["inner"][where] = _packed(each, parameters, inner_prefix(prefix, where))
        tensors |= found
    warn_of_more(optimizer, inner, parameters)
    return tensors, document


def _packed(optimizer: Optimizer, parameters: Mapping[str, Tensor], prefix: str) -> Packed:
    names = _names(optimizer, parameters)
    tensors, shared = pack_shared(optimizer, prefix)
    states: dict[str, Any] = {}
    for name, parameter in names.items():
        kept: dict[str, Any] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
                # Not its entries, of which momentum gets more with every step.
                tensors[f"{prefix}{name}/{key}"] = value.to_dense()
                kept[key] = {"tensor": True, "sparse": value.sparse_dim()}
            elif isinstance(value, Tensor):
                tensors[f"{prefix}{name}/{key}"] = value
                kept[key] = {"tensor": True}
            else:
                kept[key] = to_json(
                    value, f"state '{key}' of '{name}'", parameter.device, "tensors, "
                )
        states[name] = {"shape": list(parameter.shape), "state": kept}
    by_id = {id(parameter): name for name, parameter in names.items()}
    groups = [
        {
            "parameters": [by_id[id(parameter)] for parameter in group["params"]],
            "options": {
                key: to_json(value, f"option '{key}'", device_of(group["params"]))
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
        }
        for group in optimizer.param_groups
    ]
    kind = type(optimizer).__name__
    return tensors, {"class": kind, "groups": groups, "parameters": states, "shared": shared}


def unpack_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    prefix: str = "optimizer/",
) -> None:
    """Gives `optimizer` the state that `pack_optimizer` took, bit for bit, options included, but
    for which of torch's kernels compute a step (`fused`, `foreach`, `capturable`). What was sparse
    is so again, coalesced: a row is the sum of its entries.

    Everything is checked first: on an error the optimizer is as it was. Raises `FileError` when the
    class, the parameters, their shapes or groups differ, or a state tensor is missing or left over.
    State that the save left out stays as the optimizer has it, and that of optimizers inside which
    are not there is left, with a warning.
    """
    inner = inner_to_load(optimizer, parameters, document)
    put = [_read(optimizer, parameters, tensors, document, prefix)]
    for where, each in inner.items():
        begin = inner_prefix(prefix, where)
        put.append(_read(each, parameters, tensors, document["inner"][where], begin))
    for where, read in zip(inner, put[1:], strict=True):
        tell_rates(where, read.optimizer, optimizer, read.groups)
    for read in put:
        _put(read, tensors)


class _Read(NamedTuple):
    """What a checkpoint has for an optimizer, checked."""

    optimizer: Optimizer
    names: dict[str, Tensor]
    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    states: dict[str, dict[str, Any]]
    shared: dict[str, Any] | None
    prefix: str


def _read(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    prefix: str,
) -> _Read:
    names = _names(optimizer, parameters)
    try:
        _check_fit(optimizer, names, document)
        wanted = {
            f"{prefix}{name}/{key}"
            for name, entry in document["parameters"].items()
            for key, value in entry["state"].items()
            if in_file(value)
        }
        wanted.update(shared_names(document, prefix))
        there = {n for n in tensors if n.startswith(prefix) and not is_inner(n, prefix)}
        _same_names(there, wanted, "state tensors")
        groups = _matched(optimizer, names, document)
        states = _plain_states(names, document)
        _check_states(optimizer, names, tensors, document, prefix)
        shared = read_shared(optimizer, tensors, document, prefix)
    except FileError:
        raise
    except _DAMAGES as error:
        raise FileError(f"the optimizer's record is damaged: {error!r}") from None
    return _Read(optimizer, names, groups, states, shared, prefix)


def _put(read: _Read, tensors: Mapping[str, Tensor]) -> None:
    optimizer, names, groups, states, shared, prefix = read
    for group, options in groups:
        for key, value in options.items():
            if key in OF_THE_CODE:
                continue
            if (
                key == "lr"
                and isinstance(group.get(key), int | float)
                and isinstance(value, Tensor)
            ):
                value = value.item()  # a rate is of the kind that this optimizer was given
            group[key] = _fitted(value, group.get(key))
        own = getattr(optimizer, "steps_on_host", False)  # LeZero's kernels
        on_device = bool(group.get("capturable") or group.get("fused")) and not own
        by_id = {id(parameter): name for name, parameter in names.items()}
        for parameter in group["params"]:
            name = by_id[id(parameter)]
            state = states[name]
            for key, value in state.items():
                if in_file(value):
                    tensor = tensors[f"{prefix}{name}/{key}"]
                    stays = key == "step" and not on_device
                    laid = _laid(tensor, parameter, "cpu" if stays else parameter.device, own)
                    state[key] = laid.to_sparse(value["sparse"]) if "sparse" in value else laid
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)
    put_shared(optimizer, shared)


def _names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's parameters by the names that the model gives them."""
    by_id: dict[int, str] = {}
    for name, parameter in parameters.items():
        by_id.setdefault(id(parameter), name)
    found: dict[str, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in by_id:
                raise OrderError(
                    f"group {number} of the optimizer holds a parameter (number {index}, shape "
                    f"{tuple(parameter.shape)}) that the model does not have; build the optimizer "
                    "after everything that replaces parameters"
                )
            found[by_id[id(parameter)]] = parameter
    return found


def _check_fit(
    optimizer: Optimizer, names: Mapping[str, Tensor], document: Mapping[str, Any]
) -> None:
    if document["class"] != type(optimizer).__name__:
        raise FileError(
            f"the checkpoint holds the state of {document['class']}, this optimizer is "
            f"{type(optimizer).__name__}; build the one it was saved with, or begin in another "
            "folder"
        )
    _same_names(set(document["parameters"]), set(names), "optimizer parameters")
    for name, parameter in names.items():
        saved = document["parameters"][name]["shape"]
        if saved != list(parameter.shape):
            raise FileError(
                f"parameter '{name}' has shape {tuple(parameter.shape)}; its optimizer state was "
                f"saved for {tuple(saved)}"
            )


def _check_states(
    optimizer: Optimizer,
    names: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    prefix: str,
) -> None:
    """Asks an optimizer that can tell (`check_state`) whether each tensor's shape and type fit."""
    torchs = type(optimizer) is torch.optim.AdamW
    check = getattr(optimizer, "check_state", _refuse_masters if torchs else None)
    if check is None:
        return
    for name, parameter in names.items():
        kept = document["parameters"][name]["state"].items()
        state = {key: tensors[f"{prefix}{name}/{key}"] for key, v in kept if in_file(v)}
        try:
            check(parameter, state)
        except ConfigError as error:
            raise FileError(f"parameter '{name}': {error}") from None


def _refuse_masters(parameter: Tensor, state: Mapping[str, Any]) -> None:
    if any(key in state for key in MASTERS):
        raise ConfigError(
            f"the state holds fp32 masters, which torch's AdamW would lose for {parameter.dtype}; "
            "build the model in float32, or in bfloat16 with an lz.optim.AdamW of masters='fp32' "
            "or 'remainder'"
        )


def _same_names(found: set[str], wanted: set[str], what: str) -> None:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing or extra:
        said = [
            f"{word}: {', '.join(names[:5])}{f' and {len(names) - 5} more' * (len(names) > 5)}"
            for word, names in (("missing", missing), ("not expected", extra))
            if names
        ]
        raise FileError(f"{what} of the checkpoint do not fit; {'; '.join(said)}")


def _matched(
    optimizer: Optimizer, names: Mapping[str, Tensor], document: Mapping[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group of the optimizer with the saved options of the same parameters."""
    by_id = {id(parameter): name for name, parameter in names.items()}
    saved = {frozenset(group["parameters"]): group for group in document["groups"]}
    pairs = []
    for number, group in enumerate(optimizer.param_groups):
        members = frozenset(by_id[id(parameter)] for parameter in group["params"])
        if members not in saved:
            shown = ", ".join(sorted(members)[:5])
            raise FileError(
                f"group {number} of the optimizer ({shown}…) was not a group when it was saved; "
                f"build it with the {len(saved)} of then. lezero.optim has two of a module, whose "
                "norms, biases and embeddings are not decayed, and one of model.parameters()"
            )
        near = device_of(group["params"])
        options = {k: from_json(v, near) for k, v in saved[members]["options"].items()}
        pairs.append((group, options))
    return pairs


def _plain_states(
    names: Mapping[str, Tensor], document: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The saved state of each parameter, by its name; tensors of the file are still to come."""
    for name, parameter in names.items():
        for value in document["parameters"][name]["state"].values():
            dims = range(1, parameter.dim() + 1)
            if in_file(value) and "sparse" in value and value["sparse"] not in dims:
                raise ValueError(f"{value} of '{name}'")
    return {
        name: {
            key: value if in_file(value) else from_json(value, parameter.device)
            for key, value in document["parameters"][name]["state"].items()
        }
        for name, parameter in names.items()
    }


def _laid(tensor: Tensor, parameter: Tensor, place: torch.device | str, contiguous: bool) -> Tensor:
    """A copy at `place`, laid out in memory as the parameter is unless `contiguous`: torch's fused
    kernels walk weights and moments side by side and never look at their strides."""
    alike = tensor.shape == parameter.shape and not hasattr(parameter, "to_local")
    if contiguous or not alike or parameter.is_contiguous():
        return tensor.detach().to(place, copy=True)
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor.detach())


def _fitted(saved: Any, current: Any) -> Any:
    """A saved option in the form the optimizer holds it: tuples and tensors stay such."""
    if isinstance(current, Tensor) and isinstance(saved, Tensor | int | float):
        return current.fill_(saved.item() if isinstance(saved, Tensor) else saved)
    if isinstance(current, tuple) and isinstance(saved, list):
        olds = current if len(current) == len(saved) else [None] * len(saved)
        return tuple(_fitted(item, old) for item, old in zip(saved, olds, strict=True))
    return saved
