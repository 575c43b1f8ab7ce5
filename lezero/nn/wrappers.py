"""Modules that hold another one whole, and so give every parameter another name."""

from __future__ import annotations

from torch import nn

_WRAPPED = {"_orig_mod": "torch.compile", "module": "DistributedDataParallel or DataParallel"}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of torch.compile's and DDP's, whose parameters have their own names."""
    while name := _held(module):
        module = module.get_submodule(name)
    return module


def why_wrapped(module: nn.Module) -> str:
    """Of a module that torch.compile or DDP made of another: an error's words; else nothing."""
    name = _held(module)
    if not name:
        return ""
    return (
        f"got a module wrapped by {_WRAPPED[name]}, which renames every parameter; give the "
        f"module inside it (wrapped.{name}) and wrap or compile afterwards"
    )


def is_flattened(module: nn.Module) -> bool:
    """Whether it is one of torch's first FSDP, whose layers have views of one split parameter."""
    return any(
        kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith("torch.")
        for kind in type(module).__mro__
    )


def _held(module: nn.Module) -> str:
    """What a wrapper calls the module inside; nothing of others."""
    parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    named = ("_orig_mod", *(("module",) if parallel else ()))
    return next((name for name in named if name in module._modules), "")
