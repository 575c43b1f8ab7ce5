"""What somebody else registered in place of a sharded parameter: for good, or for one call."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless

from lezero.core.errors import OrderError
from lezero.core.frames import frames_stay
from lezero.parallel.zero.held import local, retire

if TYPE_CHECKING:
    from types import FrameType


def adopt(name: str, sharded: nn.Parameter, found: torch.Tensor | None) -> None:
    """Takes the values of a parameter that somebody registered in place of the sharded one, which
    the caller registers again."""
    same = isinstance(found, nn.Parameter) and type(found.data) is type(sharded.data)
    if not isinstance(found, nn.Parameter) or not same or found.shape != sharded.shape:
        raise OrderError(
            f"parameter '{name}' was replaced after sharding by one that is not sharded "
            "alike; load or assign it before lz.shard_, or copy into the sharded parameter"
        )
    with torch.no_grad():
        local(sharded.detach()).copy_(local(found.detach()))
        retire(found, name)


def stands_in(found: torch.Tensor | None) -> bool:
    """Whether `found`, registered in place of a parameter, is there for one `functional_call`
    alone, which computes with it as it is and puts the parameter back."""
    return found is not None and (not isinstance(found, nn.Parameter) or _lent_by_torch(found))


def stands_in_whole(name: str, found: torch.Tensor | None) -> bool:
    """The same, for parameter `name`; `OrderError` for one that is split over the ranks."""
    if not stands_in(found):
        return False
    if isinstance(found, DTensor):
        raise OrderError(
            f"functional_call: what was given for parameter '{name}' is split over the ranks; "
            "give whole tensors, made from those of full_parameters(model) or with .full_tensor()"
        )
    return True


def _lent_by_torch(found: torch.Tensor) -> bool:
    """Whether a `functional_call` that runs now, on whichever thread, was given `found`."""
    code = stateless._functional_call.__code__
    at: FrameType | None = None
    try:
        with frames_stay():
            for at in sys._current_frames().values():
                while at is not None:
                    if at.f_code is code:
                        given = at.f_locals["parameters_and_buffers"].values()
                        if any(found is value for value in given):
                            return True
                    at = at.f_back
    finally:
        del at  # it may be that of this call: a circle, with what its callers hold in it
    return False
