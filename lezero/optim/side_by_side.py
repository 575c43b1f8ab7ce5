"""Weights, gradients and moments that lie in memory alike, as torch's fused kernels need them.

[Note: kernels that look at no strides]
torch's fused optimizers walk a weight, its gradient and its moments side by side, element by
element as they lie in memory, and never look at their strides. Where one lies otherwise (a
transposed or channels-last gradient that was assigned, moments of a checkpoint of another layout)
each weight gets the step of another one; and of a weight with gaps (a slice of a larger one) they
change what lies in the gaps. Nor do they look at sizes: where a weight grew behind its moments
(transformers' `resize_token_embeddings` keeps the parameter), they write beyond these. torch's
other implementations are right there, or say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lezero.core.errors import ConfigError

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@contextmanager
def side_by_side(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, what belongs to a parameter of a fused group lies as that does, without gaps.

    Gradients and weights are put back afterwards; moments stay as they were laid. Gradients hold
    then what the step made of them: torch's kernels divide them by the scale of a `GradScaler`.
    """
    with ExitStack() as undo, torch.no_grad():
        states = optimizer.state
        for group in optimizer.param_groups:
            if group.get("fused"):
                for parameter in group["params"]:
                    grad = parameter.grad
                    if grad is not None and not _lie_plainly(parameter, grad, states):
                        _lay(parameter, grad, states.get(parameter, {}), undo.callback)
        yield


def _lie_plainly(parameter: Tensor, grad: Tensor, states: Mapping[Tensor, Any]) -> bool:
    """Whether all is contiguous and of one size, as it nearly always is: this is asked of each at
    every step."""
    if type(parameter) is not nn.Parameter or not parameter.is_contiguous():
        return False
    if grad.layout != torch.strided or not grad.is_contiguous():
        return False
    if not (state := states.get(parameter)):
        return grad.shape == parameter.shape
    size = parameter.shape
    for key in _MOMENTS:
        moment = state.get(key)
        if moment is not None and not (moment.is_contiguous() and moment.shape == size):
            return False
    return grad.shape == size


def _lay(parameter: Tensor, grad: Tensor, state: dict[str, Any], later: Callable[..., Any]) -> None:
    if grad.layout != torch.strided:
        return  # which torch refuses
    moments = {key: state[key] for key in _MOMENTS if key in state}
    every = [_held(x) for x in (parameter, grad, *moments.values())]
    for key, value in zip(("its gradient", *moments), every[1:], strict=True):
        if value.shape != every[0].shape:
            raise ConfigError(
                f"optimizer: a parameter is {tuple(every[0].shape)} and {key} "
                f"{tuple(value.shape)}: it was resized after the optimizer was made; build a new "
                "optimizer, and a new Engine where one runs it"
            )
    if all(x.is_contiguous() for x in every):
        return
    weight = every[0]
    if not torch.ops.aten.is_non_overlapping_and_dense(weight):
        was = weight.data
        weight.data = was.contiguous()
        later(partial(_put_back, weight, was))
    for key, value in moments.items():
        if _held(value).stride() != weight.stride():
            state[key] = _laid(value, weight)
    if _held(grad).stride() != weight.stride():
        parameter.grad = _laid(grad, weight)
        later(partial(_give_back, parameter, grad, parameter.grad))


def _held(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, the tensor itself that it holds; anything else as it is."""
    return getattr(x, "_local_tensor", x)


def _give_back(parameter: Tensor, grad: Tensor, laid: Tensor) -> None:
    """One that is expanded, as those of sums are, takes no values: its copy stays."""
    held = _held(grad)
    steps = zip(held.stride(), held.shape, strict=True)
    if not any(step == 0 and size > 1 for step, size in steps):
        held.copy_(_held(laid))
        parameter.grad = grad


def _put_back(weight: Tensor, was: Tensor) -> None:
    was.copy_(weight.data)
    weight.data = was


def _laid(x: Tensor, weight: Tensor) -> Tensor:
    """A copy with the strides of `weight`, a DTensor where `x` is one."""
    held = _held(x)
    made = torch.empty_like(weight, dtype=held.dtype, device=held.device).copy_(held)
    if held is x:
        return made
    from torch.distributed.tensor import DTensor

    assert isinstance(x, DTensor)
    return DTensor.from_local(
        made, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
