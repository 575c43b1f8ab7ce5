"""A parameter whose shape is not known yet, and that says so.

Torch's own `UninitializedParameter` lets an optimizer be built and a state dict be saved, and
fails later or elsewhere. `UnsizedParameter` refuses at once, with an `OrderError` that names the
module, the line that made it and the remedy.

[Note: What an unsized parameter allows] Asking for its device, dtype, gradient (None) and
`requires_grad` is harmless and allowed, so `model.to(...)`, `model.zero_grad()` and
`next(model.parameters()).device` work. What needs its values or its identity (an optimizer reads
`is_leaf`, a save calls `detach`, DDP and FSDP read sizes, copies call `__deepcopy__`) is refused.
It derives from torch's mixin, so `torch.nn.parameter.is_lazy` knows it, but not from
`UninitializedParameter`, since DDP answers that class with an error that names nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from lezero.core.errors import OrderError

_REFUSED_PROPERTIES = {"is_leaf", "retains_grad", "ndim", "nbytes", "T", "mT", "H", "mH"}
_ALLOWED_FUNCTIONS = {
    torch.Tensor.__hash__,
    torch.Tensor.is_complex,
    torch.Tensor.is_floating_point,
    torch.Tensor.requires_grad_,
    torch.Tensor.get_device,
}


class UnsizedParameter(UninitializedTensorMixin, torch.nn.Parameter):
    """Stands for a parameter until its module is sized. `owner` describes that module."""

    cls_to_become = torch.nn.Parameter
    owner: str

    def __new__(
        cls,
        owner: str,
        requires_grad: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> UnsizedParameter:
        # A placeholder is a real tensor even in a fake (shape-only) run: it holds no data.
        with torch._C._DisableTorchDispatch():
            data = torch.empty(0, device=device, dtype=dtype)
        parameter = torch.Tensor._make_subclass(cls, data, requires_grad)
        parameter.owner = owner
        return parameter

    def again(self, like: torch.Tensor) -> UnsizedParameter:
        """A fresh unsized parameter of the same owner, with the device and dtype of `like`."""
        return UnsizedParameter(self.owner, self.requires_grad, like.device, like.dtype)

    @property
    def shape(self) -> NoReturn:  # type: ignore[override]
        refuse(self.owner)

    def share_memory_(self) -> NoReturn:
        refuse(self.owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse(self.owner)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self.owner)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<unsized parameter of {self.owner}>"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__class__.__name__ == "method-wrapper":
            allowed = getattr(func.__self__, "__name__", "") not in _REFUSED_PROPERTIES
        else:
            allowed = func in _ALLOWED_FUNCTIONS
        if allowed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, cls)]
        refuse(found[0].owner if found else "a module")


def refuse(owner: str, what: str = "") -> NoReturn:
    """Raises the one error for everything that comes before the first call of `owner`."""
    raise OrderError(
        f"{owner} has no size yet{what}: it takes its channels from its first input, and an "
        "optimizer, a save, a copy, compile or a wrap (DDP, FSDP) must come after that. Do one of "
        "these first: call the model once on a batch (in the mode, train or eval, that reaches "
        "this layer); or give the size when you make it, channels=...; or load a state_dict"
    )


def check_sized(model: torch.nn.Module) -> None:
    """Raises `OrderError` for the first parameter or buffer of `model` that has no size yet, one of
    torch's lazy layers included."""
    for prefix, module in model.named_modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, UnsizedParameter):
                refuse(tensor.owner)
            if torch.nn.parameter.is_lazy(tensor):
                named = f"module '{prefix}'" if prefix else "the model"
                raise OrderError(
                    f"{named} ({type(module).__name__}) has no size yet: it takes it from "
                    "its first input; call the model once on a batch (in the mode, train or "
                    "eval, that reaches this layer), or load a state_dict, before this"
                )


def made_at() -> str:
    """'file.py, line 7': the nearest calling line outside this package, for error messages."""
    here = os.path.dirname(__file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here + os.sep):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
