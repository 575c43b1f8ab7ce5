"""Modules that hold another one whole, and so give every parameter another name."""

from __future__ import annotations

from torch import nn

_WRAPPED = {"_orig_mod": "torch.compile", "module": "DistributedDataParallel or DataParallel"}


def why_wrapped(module: nn.Module) -> str:
    """Of a module that torch.compile or DDP made of another: an error's words; else nothing."""
    parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    for name, wrapper in _WRAPPED.items():
        if name in module._modules and (name == "_orig_mod" or parallel):
            return (
                f"got a module wrapped by {wrapper}, which renames every parameter; give the "
                f"module inside it (wrapped.{name}) and wrap or compile afterwards"
            )
    return ""
