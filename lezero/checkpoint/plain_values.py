"""Plain values of an optimizer as JSON has them, and back: numbers, text, lists, small tensors.

JSON has neither infinity nor tensors: a float that is not finite is `{"float": "inf"}`, a tensor of
one element `{"value": 0.5, "dtype": "float32", "shape": []}`.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lezero.core.errors import FileError

_NOT_FINITE = {str(number): number for number in (math.inf, -math.inf, math.nan)}


def to_json(value: Any, what: str, near: torch.device, also: str = "") -> Any:
    """`value` as a JSON document has it; tuples are lists.

    `near` is where the parameters that it belongs to are. Raises `FileError`, which calls the value
    `what`, for one that is not plain; `also` is what the caller saves besides.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        number = to_json(value.item(), what, near)
        return {"value": number, "dtype": dtype, "shape": list(value.shape)} | place(value, near)
    if isinstance(value, list | tuple):
        item_of = f"an item of {what.removeprefix('an item of ')}"
        return [to_json(item, item_of, near) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Real):  # numpy's too
        number = int(value) if isinstance(value, Integral) else float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    raise FileError(
        f"{what} of the optimizer is {_kind(value)}, which cannot be saved; allowed are {also}"
        "None, real numbers, text, real tensors of one element, and lists of these"
    )


def from_json(saved: Any, near: torch.device) -> Any:
    """What `to_json` was given, its tensors beside parameters that are on `near`; tuples come back
    as lists. Raises `KeyError`, `TypeError` or `ValueError` for what `to_json` cannot have made."""
    if isinstance(saved, list):
        return [from_json(item, near) for item in saved]
    if not isinstance(saved, dict):
        return saved
    if "float" in saved:
        return _NOT_FINITE[saved["float"]]
    dtype, shape = getattr(torch, saved["dtype"], None), saved["shape"]
    number = from_json(saved["value"], near)
    one = isinstance(shape, list) and all(type(size) is int and size == 1 for size in shape)
    if not (one and isinstance(dtype, torch.dtype) and isinstance(number, bool | int | float)):
        raise ValueError(f"{saved} is no tensor of one element")
    to = device_in(saved, near)
    try:
        tensor = torch.tensor(number, dtype=dtype, device="cpu").reshape(shape)
    except RuntimeError as error:  # a number that the type does not hold
        raise ValueError(f"{saved}: {error}") from None
    return tensor.to(to)


def device_in(saved: dict[str, Any], near: torch.device) -> torch.device:
    """Where a saved tensor belongs, as `place` noted it."""
    if saved.get("device", "cpu") != "cpu":
        raise ValueError(f"{saved} is on a device other than 'cpu'")
    return torch.device("cpu") if "device" in saved else near


def place(tensor: Tensor, near: torch.device) -> dict[str, str]:
    """What is noted of a tensor that is on the CPU although its parameters, on `near`, are not."""
    return {"device": "cpu"} if tensor.device.type == "cpu" != near.type else {}


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    if value.is_complex():
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    return f"a tensor of shape {tuple(value.shape)}"
