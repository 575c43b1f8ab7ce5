"""The ops `lezero::adamw_` and `lezero::adamw8bit_`: arguments checked, then the best kernel.

Both work in place on one parameter. The native kernels serve the CPU, Triton an accelerator, and
the reference everything else.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.adamw import eight_bit, reference
from lezero.ops.adamw.native import NATIVE

_library = torch.library.Library("lezero", "FRAGMENT")
_OPTIONS = "float lr, float beta1, float beta2, float eps, float weight_decay"
_library.define(
    "adamw_(Tensor(a!) param, Tensor(b!)? extra, Tensor grad, Tensor(c!) exp_avg, "
    f"Tensor(d!) exp_avg_sq, Tensor step, {_OPTIONS}) -> ()"
)
_library.define(
    "adamw8bit_(Tensor(a!) param, Tensor(b!)? extra, Tensor grad, Tensor(c!) exp_avg, "
    "Tensor(d!) exp_avg_scale, Tensor(e!) exp_avg_sq, Tensor(f!) exp_avg_sq_scale, "
    f"Tensor step, {_OPTIONS}) -> ()"
)


def check_weight(param: Tensor, extra: Tensor | None, grad: Tensor) -> None:
    """Raises `ConfigError` unless these are a weight, what completes it, and its gradient."""
    if param.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"AdamW: a parameter is {param.dtype}; allowed is float32 or bfloat16")
    if grad.dtype not in (torch.float32, torch.bfloat16) or grad.shape != param.shape:
        raise ConfigError(
            f"AdamW: the gradient is {grad.dtype} {tuple(grad.shape)}; allowed is float32 or "
            f"bfloat16 of the parameter's shape {tuple(param.shape)}"
        )
    if extra is not None:
        allowed = (torch.float32, torch.int16) if param.dtype == torch.bfloat16 else ()
        if extra.dtype not in allowed:
            raise ConfigError(f"AdamW: {param.dtype} parameters have no {extra.dtype} master")
        check_state("master", extra, param.shape, extra.dtype)


def check_state(name: str, found: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises `ConfigError` for a state tensor of another shape or type, as a file may hold."""
    if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
        raise ConfigError(
            f"AdamW: state '{name}' is {found.dtype} {tuple(found.shape)}; it must be {dtype} "
            f"{tuple(shape)}"
        )


def _adamw(
    param: Tensor,
    extra: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    check_weight(param, extra, grad)
    for name, state in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_state(name, state, param.shape, torch.float32)
    c = reference.coefficients(step.item(), lr, beta1, beta2, eps, weight_decay)
    changed = [param, extra, exp_avg, exp_avg_sq]
    if param.device.type != "cpu" and _has_triton():
        from lezero.ops.adamw import triton_kernel

        dense = _dense(changed)
        triton_kernel.adamw(*_with_grad(dense, grad.contiguous(), c))
    elif param.device.type != "cpu" or not NATIVE.available():
        reference.adamw(*_with_grad(changed, grad, c))
        return
    else:
        dense = _dense(changed)
        weight, more, *rest = _with_grad(dense, grad.contiguous())
        more = weight if more is None else more
        NATIVE.ops.adamw(weight, more, *rest, _kind(param, extra), *c)
    _give_back(changed, dense)


def _adamw8bit(
    param: Tensor,
    extra: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    check_weight(param, extra, grad)
    if param.dim() == 0:
        raise ConfigError("AdamW8bit: a scalar has no rows; keep its state in fp32")
    scales = eight_bit.scales_shape(param.shape)
    for name, codes, scale in (
        ("exp_avg", exp_avg, exp_avg_scale),
        ("exp_avg_sq", exp_avg_sq, exp_avg_sq_scale),
    ):
        check_state(name, codes, param.shape, torch.uint8)
        check_state(f"{name}_scale", scale, scales, torch.float32)
    if not param.numel():
        return
    c = reference.coefficients(step.item(), lr, beta1, beta2, eps, weight_decay)
    changed = [param, extra, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale]
    if param.device.type != "cpu" and _has_triton():
        from lezero.ops.adamw import triton_kernel

        dense = _dense(changed)
        triton_kernel.adamw8bit(*_with_grad(dense, grad.contiguous(), c))
    elif param.device.type != "cpu" or not NATIVE.available():
        reference.adamw8bit(*_with_grad(changed, grad, c))
        return
    else:
        dense = _dense(changed)
        weight, more, *rest = _with_grad(dense, grad.contiguous())
        more = weight if more is None else more
        NATIVE.ops.adamw8bit(weight, more, *rest, eight_bit.tables(), _kind(param, extra), *c)
    _give_back(changed, dense)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _with_grad(tensors: list[Tensor | None], grad: Tensor, *more: Any) -> Any:
    """In the kernels' order: weight, extra, gradient, state, and what else they take."""
    return (*tensors[:2], grad, *tensors[2:], *more)


def _kind(param: Tensor, extra: Tensor | None) -> int:
    """As problem.h numbers the ways to keep a weight."""
    if param.dtype == torch.float32:
        return 0
    if extra is None:
        return 1
    return 2 if extra.dtype == torch.float32 else 3


def _dense(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _give_back(tensors: list[Tensor | None], dense: list[Tensor | None]) -> None:
    for to, found in zip(tensors, dense, strict=True):
        if to is not None and found is not None and found.data_ptr() != to.data_ptr():
            to.copy_(found)


def _fake(*_: Any) -> None:
    """Everything is changed in place; nothing is returned."""


for _name, _function in (("adamw_", _adamw), ("adamw8bit_", _adamw8bit)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lezero::{_name}", _fake, lib=_library)
