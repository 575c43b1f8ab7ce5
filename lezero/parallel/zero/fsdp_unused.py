"""Ranks that use different parameters under FSDP2.

In one reduce-scatter FSDP2 packs the gradients that this rank has. Where another rank has others,
as experts give, one parameter's would be added to another's, or the ranks would wait for each other
for ever. So those that did not come count as zeros (torch 2.13 has a switch for that, 2.11 has
not), and where they came on no rank the parameter has no gradient in the end, as without sharding:
zeros would have its weights decayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lezero.core import groups


class Unused:
    """Of one sharded model. `states`: FSDP2's, one a module; `parts`: what it reduces together."""

    def __init__(self, states: Sequence[Any], parts: Sequence[Any]) -> None:
        self._parts = list(parts)
        self._parameters = [one for part in parts for one in part.fsdp_params]
        self._used: set[int] = set()
        self._new: set[int] = set()  # of shards whose gradient is zeros made here, and nothing else
        for part in parts:
            part.post_backward = self._with_zeros(part, part.post_backward)
        for state in states:  # the one whose backward begins first calls it
            end = state._root_post_backward_final_callback
            state._root_post_backward_final_callback = self._with_end(end)

    def _with_zeros(self, part: Any, reduce: Callable[..., None]) -> Callable[..., None]:
        def post_backward(*arguments: Any) -> None:
            if part.reduce_grads:
                for one in part.fsdp_params:
                    self._complete(one)
                _settle_types(part)
            reduce(*arguments)

        return post_backward

    def _complete(self, one: Any) -> None:
        whole = getattr(one, "_unsharded_param", None)
        if whole is None or not one.sharded_param.requires_grad:
            return
        if whole.grad is not None or one.unsharded_accumulated_grad is not None:
            self._used.add(id(one))
            return
        whole.grad = torch.zeros_like(whole)
        if one.sharded_param.grad is None:
            self._new.add(id(one.sharded_param))

    def reached(self, shard: int) -> None:
        """A gradient came to the shard of this id itself, as of a penalty."""
        self._new.discard(shard)

    def _with_end(self, end: Callable[[], None]) -> Callable[[], None]:
        def final_callback() -> None:
            end()
            self._agree()

        return final_callback

    def _agree(self) -> None:
        """After a backward: takes away the zeros of parameters that no rank has used."""
        if not self._parts[0].reduce_grads:
            return
        used = [id(one) in self._used for one in self._parameters]
        place = self._parts[0].device
        flags = torch.ones(len(used), device=place)
        if not all(used):
            flags = torch.tensor(used, dtype=flags.dtype).to(place)
        with groups.watched("all_reduce", flags.shape, flags.dtype, "which gradients came"):
            dist.all_reduce(flags)
        if not all(used):  # only then the host waits for the device
            for one, count in zip(self._parameters, flags.tolist(), strict=True):
                if not count and id(one.sharded_param) in self._new:
                    one.sharded_param.grad = None
        self._used.clear()
        self._new.clear()


def _settle_types(part: Any) -> None:
    """Torch takes the types of the sums from what was trained at first: anew where others are now.

    What was collected before is in the type of the sums, and torch wants one type of all.
    """
    trained = (one for one in part.fsdp_params if one.sharded_param.requires_grad)
    if any(one.orig_dtype != part._orig_dtype for one in trained):
        part._init_mp_dtypes()
    if any(one.unsharded_accumulated_grad is not None for one in part.fsdp_params):
        for one in part.fsdp_params:
            if one.unsharded_accumulated_grad is None:
                one.to_accumulated_grad_if_needed()
