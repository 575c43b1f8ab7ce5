"""Plain values of an optimizer as JSON has them, and back: numbers, text, lists, small tensors.

JSON has neither infinity nor tensors: a float that is not finite is `{"float": "inf"}`, a tensor of
one element `{"value": 0.5, "dtype": "float32", "shape": []}`.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import FileError

_NOT_FINITE = {str(number): number for number in (math.inf, -math.inf, math.nan)}


def to_json(value: Any, what: str, near: torch.device) -> Any:
    """`value` as a JSON document has it; tuples are lists.

    `near` is where the parameters that it belongs to are. Raises `FileError`, which calls the value
    `what`, for one that is not plain.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        number = to_json(value.item(), what, near)
        return {"value": number, "dtype": dtype, "shape": list(value.shape)} | place(value, near)
    if isinstance(value, list | tuple):
        return [to_json(item, what, near) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Real):  # numpy's too
        number = int(value) if isinstance(value, Integral) else float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    raise FileError(
        f"{what} of the optimizer is a {type(value).__name__}, which cannot be saved; allowed are "
        "tensors, numbers, text, and lists of numbers, text and tensors of one element"
    )


def from_json(saved: Any, near: torch.device) -> Any:
    """What `to_json` was given, its tensors beside parameters that are on `near`."""
    if isinstance(saved, list):
        return [from_json(item, near) for item in saved]
    if not isinstance(saved, dict):
        return saved
    if "float" in saved:
        return _NOT_FINITE[saved["float"]]
    dtype = getattr(torch, saved["dtype"])
    number = torch.tensor(from_json(saved["value"], near), dtype=dtype)
    return number.reshape(saved["shape"]).to(saved.get("device", near))


def place(tensor: Tensor, near: torch.device) -> dict[str, str]:
    """What is noted of a tensor that is on the CPU although its parameters, on `near`, are not."""
    return {"device": "cpu"} if tensor.device.type == "cpu" != near.type else {}
