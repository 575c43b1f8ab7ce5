"""The ops `lezero::adamw_` and `lezero::adamw8bit_`: arguments checked, then the best kernel.

Both work in place on one parameter; `adamw_all` on many. The native kernels serve the CPU, Triton
NVIDIA's and AMD's accelerators, and the reference everything else. What a kernel has written is
told to autograd, so that a backward over weights that are gone is an error, as with torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version

from lezero.core.errors import ConfigError
from lezero.ops.adamw import eight_bit, reference
from lezero.ops.adamw.native import NATIVE
from lezero.ops.adamw.reference import Problem
from lezero.ops.triton_runs import triton_runs

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
    if found.shape != shape or found.dtype != dtype:
        raise ConfigError(
            f"AdamW: state '{name}' is {found.dtype} {tuple(found.shape)}; it must be {dtype} "
            f"{tuple(shape)}"
        )


def _plain(
    param: Tensor,
    extra: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *options: float,
) -> Problem:
    check_weight(param, extra, grad)
    for name, state in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_state(name, state, param.shape, torch.float32)
    c = reference.coefficients(step.item(), *options)
    return Problem(param, extra, grad, (exp_avg, exp_avg_sq), c)


def _coded(
    param: Tensor,
    extra: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    step: Tensor,
    *options: float,
) -> Problem:
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
    c = reference.coefficients(step.item(), *options)
    state = (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    return Problem(param, extra, grad, state, c)


_CHECKS: dict[str, Callable[..., Problem]] = {"adamw_": _plain, "adamw8bit_": _coded}


def adamw_all(name: str, arguments: Iterable[tuple[Any, ...]]) -> None:
    """Calls the op `name` ("adamw_" or "adamw8bit_") with each; an accelerator does all at once."""
    together = []
    for one in arguments:
        if isinstance(one[0], FakeTensor) or not triton_runs(one[0].device):
            getattr(torch.ops.lezero, name)(*one)
        elif all(x.is_contiguous() for x in one if isinstance(x, Tensor)):
            together.append(_CHECKS[name](*one))
        else:
            _run(_CHECKS[name](*one))  # by itself: the copies it needs are not all alive together
    if together:
        _launch(together)
        increment_version(problem.param for problem in together)


def _run(problem: Problem) -> None:
    _update(problem)
    increment_version(problem.param)


def _update(problem: Problem) -> None:
    param, extra, grad, state, c = problem
    if not param.numel():
        return
    name = "adamw8bit" if len(state) == 4 else "adamw"
    native = param.device.type == "cpu" and NATIVE.available()
    if not triton_runs(param.device) and not native:
        getattr(reference, name)(param, extra, grad, *state, c)
        return
    weight, *moments = (x.contiguous() for x in (param, *state))
    more = None if extra is None else extra.contiguous()
    if triton_runs(param.device):
        _launch([Problem(weight, more, grad.contiguous(), tuple(moments), c)])
    else:
        tables = (eight_bit.tables(),) if len(state) == 4 else ()
        first = (weight, weight if more is None else more, grad.contiguous())
        getattr(NATIVE.ops, name)(*first, *moments, *tables, _kind(param, extra), *c)
    for to, found in zip((param, extra, *state), (weight, more, *moments), strict=True):
        if to is not None and found is not None and found.data_ptr() != to.data_ptr():
            to.copy_(found)


def _launch(problems: list[Problem]) -> None:
    from lezero.ops.adamw import triton_kernel

    triton_kernel.step(problems)


def _kind(param: Tensor, extra: Tensor | None) -> int:
    """As problem.h numbers the ways to keep a weight."""
    if param.dtype == torch.float32:
        return 0
    if extra is None:
        return 1
    return 2 if extra.dtype == torch.float32 else 3


def _fake(*_: Any) -> None:
    """Everything is changed in place; nothing is returned."""


def _op(check: Callable[..., Problem]) -> Callable[..., None]:
    return lambda *arguments: _run(check(*arguments))


for _name, _check in _CHECKS.items():
    _library.impl(_name, _op(_check), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lezero::{_name}", _fake, lib=_library)
