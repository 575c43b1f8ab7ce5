"""State of an optimizer that belongs to no parameter but has a text for its key: common counters.

Dictionaries are `{"dict": …}` in the document. A tensor is called `optimizer/.shared/<key>/…`, as
no parameter can be, so every rank has the whole of it: it is never split as a parameter is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lezero.checkpoint.plain_values import from_json, place, to_json
from lezero.checkpoint.rows import is_split
from lezero.core.errors import FileError

_ROOT = ".shared"


def pack_shared(
    optimizer: Optimizer, prefix: str = "optimizer/"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, not copied, and the values as JSON has them, by key.

    Raises `FileError`, naming the key, for what cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    state = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    near = _near(optimizer)
    document: dict[str, Any] = _to_json(state, prefix + _ROOT, "", near, tensors)["dict"]
    return tensors, document


def shared_names(document: Mapping[str, Any], prefix: str) -> set[str]:
    """The names of the tensors that an optimizer's document asks for."""
    return set(_names({"dict": document.get("shared", {})}, prefix + _ROOT))


def read_shared(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], document: Mapping[str, Any], prefix: str
) -> dict[str, Any] | None:
    """What `pack_shared` took, its tensors copied; None where the document does not speak of it."""
    if "shared" not in document:
        return None
    saved = {"dict": document["shared"]}
    made: dict[str, Any] = _from_json(saved, prefix + _ROOT, _near(optimizer), tensors)
    return made


def put_shared(optimizer: Optimizer, shared: Mapping[str, Any] | None) -> None:
    """Gives `optimizer` what was read, in place of what it has of it; None changes nothing."""
    if shared is None:
        return
    state: dict[Any, Any] = optimizer.state
    for key in [key for key in state if not isinstance(key, Tensor)]:
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


def _to_json(
    value: Any, name: str, where: str, near: torch.device, tensors: dict[str, Tensor]
) -> Any:
    """`value` for the document; its tensors join `tensors`, under `name` and their keys. Errors
    call it `where`: its own keys."""
    if type(value) is dict:
        kept = {}
        for key, item in value.items():
            at = f"{where}[{key!r}]"
            if not isinstance(key, str):
                raise FileError(
                    f"state{at} of the optimizer has a key of type {type(key).__name__}, which "
                    "cannot be saved; allowed are parameters and text, and in what these hold, text"
                )
            kept[key] = _to_json(item, f"{name}/{key}", at, near, tensors)
        return {"dict": kept}
    if not isinstance(value, Tensor):
        return to_json(value, f"state{where}", near)
    if is_split(value):
        raise FileError(
            f"state{where} of the optimizer is split over ranks, which can be saved of state of a "
            "parameter alone; keep it under its parameter"
        )
    if name in tensors:
        raise FileError(f"state{where} of the optimizer: another tensor is '{name}' too; rename it")
    tensors[name] = value
    return {"tensor": True} | place(value, near)


def _from_json(saved: Any, name: str, near: torch.device, tensors: Mapping[str, Tensor]) -> Any:
    if in_file(saved):
        return tensors[name].detach().to(saved.get("device", near), copy=True)
    if isinstance(saved, dict) and "dict" in saved:
        items = saved["dict"].items()
        return {key: _from_json(item, f"{name}/{key}", near, tensors) for key, item in items}
    return from_json(saved, near)


def _names(saved: Any, name: str) -> Iterator[str]:
    if in_file(saved):
        yield name
    elif isinstance(saved, dict):
        for key, item in saved.get("dict", {}).items():
            yield from _names(item, f"{name}/{key}")
