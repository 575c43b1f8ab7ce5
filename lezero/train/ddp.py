"""torch's DDP around a loss, not around a model.

DDP looks, after a forward pass of what it wraps, which parameters the output came from, and then
lets their gradients meet in the backward pass. Around the model it would see that forward pass
alone: gradients of a loss that goes through the model's parts, or through the model by another name
(a closure, its compiled form), would never meet. Around the loss it sees all of them, and the loss
gets the model itself, attributes and all.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Losses(nn.Module):
    """What computes a loss, as the forward pass of a module with the parameters of `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return compute()


def around(model: nn.Module, sync: bool = True) -> DistributedDataParallel:
    """DDP for `model`; it is called with what computes the loss, as `Losses` are. sync: gives every
    rank the values of rank 0; else they are equal already.

    `find_unused_parameters` keeps it from re-ordering its buckets after the first step, which would
    make a resumed run sum in another order than one that was never interrupted.
    """
    _advise_nobody()
    losses = Losses(model)
    spared = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # torch's way to say so
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        losses, [f"model.{name}" for name in spared]
    )
    return DistributedDataParallel(
        losses, find_unused_parameters=True, gradient_as_bucket_view=True, init_sync=sync
    )


@functools.cache
def _advise_nobody() -> None:
    """Lets torch give its advice against `find_unused_parameters`, which it gives once a process,
    where nobody hears it: the flag is meant, and users cannot reach it.

    It comes from C++ and goes to stderr past Python's filters, except inside one of torch's own
    functions, such as `apply_`.
    """
    tiny = DistributedDataParallel(
        nn.LayerNorm(1, device="cpu"), find_unused_parameters=True, init_sync=False
    )
    number = torch.zeros(1, device="cpu")
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        number.clone().apply_(lambda _: float(tiny(number).detach()))
