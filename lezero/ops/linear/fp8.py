"""The op `lezero::linear_fp8`: float8 weights times tokens that are rounded to float8.

On an accelerator with units for float8 that is a kernel that rounds the tokens, and one product
(`torch._scaled_mm`, with a scale for each row of both). Everywhere else (the CPU, NVIDIA below
compute capability 8.9, N or K that 16 does not divide, a result type that the product cannot give)
it is the reference: tokens rounded alike, times the dequantized weight, slower than without. Both
are near each other, not equal: the reference rounds its factors to x's dtype, the product does not,
but units such as Hopper's keep only about 14 bits of a sum, for x in fp32 too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.core.log import logger
from lezero.ops.linear import reference
from lezero.ops.linear.checks import check_bias, check_devices
from lezero.ops.linear.derivatives import bias_grad, differentiate
from lezero.ops.linear.op import FLOATS
from lezero.ops.quantize.tokens import fp8_tokens
from lezero.ops.triton_runs import triton_runs

_TILE = 16  # N and K of the product are multiples of it

_library = torch.library.Library("lezero", "FRAGMENT")
_library.define("linear_fp8(Tensor x, Tensor codes, Tensor scale, Tensor? bias) -> Tensor")


def linear_fp8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (scale · codes)ᵀ + bias, with each token of x rounded to float8: (…, K) → (…, N) in x's
    dtype.

    `codes` (N, K), float8_e4m3fn, and `scale` (N, 1), fp32, are those of `quantize(weight,
    Grid("fp8"))`. A token with a NaN or an infinity has outputs that are NaN. Raises `ConfigError`
    for shapes, dtypes and devices that do not fit. Differentiable in x and bias, as if x had not
    been rounded.
    """
    check_devices("linear_fp8", x=x, codes=codes, scale=scale, bias=bias)
    if codes.dtype != torch.float8_e4m3fn or codes.dim() != 2 or not codes.is_contiguous():
        raise ConfigError(
            f"linear_fp8: codes are {codes.dtype} {tuple(codes.shape)}; allowed are contiguous "
            "float8_e4m3fn (N, K)"
        )
    N, K = codes.shape
    if x.dtype not in FLOATS or x.shape[-1:] != (K,):
        raise ConfigError(
            f"linear_fp8: x is {x.dtype} {tuple(x.shape)}; allowed are fp32, bf16 and fp16 of "
            f"(…, {K}) for {N} × {K}"
        )
    if scale.dtype != torch.float32 or tuple(scale.shape) != (N, 1):
        raise ConfigError(
            f"linear_fp8: scale is {scale.dtype} {tuple(scale.shape)}; allowed is fp32 ({N}, 1)"
        )
    check_bias("linear_fp8", bias, N)
    found: Tensor = torch.ops.lezero.linear_fp8(x, codes, scale, bias)
    return found


def product(x_MK: Tensor, codes_NK: Tensor, scale_N1: Tensor, bias: Tensor | None) -> Tensor:
    """(M, N) in x's dtype, by the units for float8. `x_MK` is contiguous."""
    a_MK, token_M = _tokens(x_MK)
    fused = bias is not None and x_MK.dtype == torch.bfloat16  # torch takes no other bias here
    out = torch._scaled_mm(
        a_MK,
        codes_NK.T,
        scale_a=token_M[:, None],
        scale_b=scale_N1.contiguous().T,
        bias=bias.to(x_MK.dtype) if fused and bias is not None else None,
        out_dtype=x_MK.dtype,
    )
    return out if bias is None or fused else out.add_(bias)


def _tokens(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    if triton_runs(x_MK.device):
        from lezero.ops.linear import triton_fp8

        return triton_fp8.fp8_tokens(x_MK)
    return fp8_tokens(x_MK)


@functools.cache
def _multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Tried once for each result type, since torch has no list of what can do it."""
    a = torch.zeros(_TILE, _TILE, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    ones = torch.ones(_TILE, 1, dtype=torch.float32, device=device)
    try:
        torch._scaled_mm(a, a.T, scale_a=ones, scale_b=ones.T, out_dtype=dtype)
    except (RuntimeError, ValueError) as error:
        logger("ops").info(
            "torch does not multiply float8 to %s on %s (%s): layers of float8 weights and "
            "activations run as dense products",
            *(dtype, device, str(error).partition("\n")[0]),
        )
        return False
    return True


def _linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    N, K = codes.shape
    x_MK = x.contiguous().view(x.shape[:-1].numel(), K)
    fits = 0 not in (len(x_MK), N, K) and N % _TILE == 0 and K % _TILE == 0
    if fits and x.device.type != "cpu" and _multiplies_fp8(x.device, x.dtype):
        out = product(x_MK, codes, scale, bias)
    else:
        out = reference.linear_fp8(x_MK, codes, scale, bias)
    return out.view(*x.shape[:-1], N)


def _fake(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    _, codes, scale, bias = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(codes, scale)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    codes, scale = ctx.saved_tensors
    return grad @ (codes.float() * scale).to(grad.dtype), None, None, bias_grad(ctx, grad)


def _float_layer(x: Tensor, bias: Tensor | None, inputs: tuple[Any, ...]) -> Tensor:
    _, codes, scale, _ = inputs
    return torch.nn.functional.linear(x, (codes.float() * scale).to(x.dtype), bias)


_library.impl("linear_fp8", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("lezero::linear_fp8", _fake, lib=_library)
differentiate(
    *(_library, "linear_fp8"),
    save=_save,
    backward=_differentiate,
    float_layer=_float_layer,
    bias_at=3,
)
