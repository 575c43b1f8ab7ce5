"""State of an optimizer that belongs to no parameter but has a text for its key: common counters.

Dictionaries are `{"dict": …}` in the document, and what cannot be saved is `{"left_out": <type>}`:
a run had better lose that than the whole save. A tensor is called `optimizer/.shared/<key>/…`, as
no parameter can be, so every rank has the whole of it: it is never split as a parameter is.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lezero.checkpoint.plain_values import device_in, from_json, place, to_json
from lezero.checkpoint.rows import is_split
from lezero.core import groups
from lezero.core.errors import FileError
from lezero.core.log import logger

_ROOT = ".shared"
_DEEPEST = 50
_log = logger("checkpoint")
_warned: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()
"""Where state of each optimizer was said to be left out."""


def pack_shared(
    optimizer: Optimizer, prefix: str = "optimizer/"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, not copied, and the values as JSON has them, by key.

    What cannot be saved is left out; a warning says so once of each such state.
    """
    tensors: dict[str, Tensor] = {}
    state = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    left: dict[str, str] = {}
    document: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(key, str):
            name = f"{prefix}{_ROOT}/{key}"
            document[key] = _kept(value, name, f"[{key!r}]", _near(optimizer), tensors, left)
        else:
            left[f"[{key!r}]"] = (
                f"state[{key!r}] of the optimizer has a key of type {type(key).__name__}, which "
                "cannot be saved; allowed are parameters and text"
            )
    warn_of(optimizer, left)
    return tensors, document


def warn_of(optimizer: Optimizer, left: Mapping[str, str]) -> None:
    """Warns of what is left out, once of each place."""
    said = _warned.setdefault(optimizer, set())
    new = [text for where, text in left.items() if where not in said]
    said.update(left)
    if new and groups.is_main():
        _log.warning(
            "saves leave out state of the optimizer, which a load then does not restore: %s",
            "; ".join(new),
        )


def shared_names(document: Mapping[str, Any], prefix: str) -> set[str]:
    """The names of the tensors that an optimizer's document asks for."""
    return set(_names({"dict": document.get("shared", {})}, prefix + _ROOT))


def read_shared(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], document: Mapping[str, Any], prefix: str
) -> dict[str, Any] | None:
    """What `pack_shared` took, its tensors copied, and for what it left out the optimizer's own;
    None where the document does not speak of it."""
    if "shared" not in document:
        return None
    saved = {"dict": document["shared"]}
    own = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    made: dict[str, Any] = _from_json(saved, prefix + _ROOT, _near(optimizer), tensors, own)
    return made


def put_shared(optimizer: Optimizer, shared: Mapping[str, Any] | None) -> None:
    """Gives `optimizer` what was read, in place of what it has under text; None changes nothing."""
    if shared is None:
        return
    state: dict[Any, Any] = optimizer.state
    for key in [key for key in state if isinstance(key, str)]:
        del state[key]
    state.update(shared)


def in_file(saved: Any) -> bool:
    """Whether a value of the document stands for a tensor of the file."""
    return isinstance(saved, dict) and "tensor" in saved


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """Where the first of them is; the CPU for none."""
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _near(optimizer: Optimizer) -> torch.device:
    return device_of(p for group in optimizer.param_groups for p in group["params"])


def _kept(
    value: Any,
    name: str,
    where: str,
    near: torch.device,
    tensors: dict[str, Tensor],
    left: dict[str, str],
) -> Any:
    """`value` for the document; its tensors join `tensors`, under `name` and their keys, and what
    is said of parts that cannot be saved joins `left` under `where`: its own keys."""
    try:
        if not isinstance(value, Mapping):
            return _plain(value, name, where, near, tensors)
        _check_keys(value, where)
    except (FileError, RecursionError) as error:
        deep = f"state{where} of the optimizer is a {type(value).__name__} that is nested too deep"
        left[where] = str(error) if isinstance(error, FileError) else deep
        return {"left_out": type(value).__name__}
    return {
        "dict": {
            key: _kept(item, f"{name}/{key}", f"{where}[{key!r}]", near, tensors, left)
            for key, item in value.items()
        }
    }


def _check_keys(value: Mapping[Any, Any], where: str) -> None:
    for key in value:
        if not isinstance(key, str):
            raise FileError(
                f"state{where}[{key!r}] of the optimizer has a key of type {type(key).__name__}, "
                "which cannot be saved; allowed is text"
            )
    if where.count("[") > _DEEPEST:
        raise FileError(
            f"state{where[:40]}… of the optimizer is nested more than {_DEEPEST} deep, which "
            "cannot be saved; keep it flatter"
        )


def _plain(
    value: Any, name: str, where: str, near: torch.device, tensors: dict[str, Tensor]
) -> Any:
    if not isinstance(value, Tensor):
        return to_json(value, f"state{where}", near, "tensors, dictionaries by text, ")
    if is_split(value):
        raise FileError(
            f"state{where} of the optimizer is split over ranks, which can be saved of state of a "
            "parameter alone; keep it under its parameter"
        )
    if name in tensors:
        raise FileError(f"state{where} of the optimizer: another tensor is '{name}' too; rename it")
    tensors[name] = value
    return {"tensor": True} | place(value, near)


def _from_json(
    saved: Any, name: str, near: torch.device, tensors: Mapping[str, Tensor], own: Any
) -> Any:
    """The value that was saved; `own` is what the optimizer has in its place."""
    if in_file(saved):
        return tensors[name].detach().to(device_in(saved, near), copy=True)
    if not isinstance(saved, dict) or "dict" not in saved:
        return from_json(saved, near)
    mine = own if isinstance(own, Mapping) else {}
    made = {
        key: mine[key]
        if _left_out(item)
        else _from_json(item, f"{name}/{key}", near, tensors, mine.get(key))
        for key, item in saved["dict"].items()
        if not _left_out(item) or key in mine
    }
    if isinstance(own, OrderedDict | defaultdict):
        again = copy.copy(own)  # a defaultdict keeps what it makes of missing keys
        again.clear()
        again.update(made)
        return again
    return made


def _left_out(saved: Any) -> bool:
    return isinstance(saved, dict) and "left_out" in saved


def _names(saved: Any, name: str) -> Iterator[str]:
    if in_file(saved):
        yield name
    elif isinstance(saved, dict):
        for key, item in saved.get("dict", {}).items():
            yield from _names(item, f"{name}/{key}")
