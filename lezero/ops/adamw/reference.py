"""AdamW in plain PyTorch, in fp32: the formula that each kernel is held to.

Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, with the rounding
of torch's fused CPU kernel: two multiplications are fused with the addition after them, everything
else is rounded once. (That kernel rounds the second moment of up to 15 elements at the end of a
tensor otherwise. Here every element is treated alike, so slicing changes nothing.)
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lezero.ops.adamw import eight_bit, masters


class Coefficients(NamedTuple):
    """What one step multiplies by; fp64 here, rounded to fp32 where it is used."""

    decay: float
    """1 - lr · weight decay"""
    lerp: float
    """1 - beta1"""
    beta2: float
    square: float
    """1 - beta2"""
    step: float
    """-lr / (1 - beta1^t)"""
    root: float
    """√(1 - beta2^t)"""
    eps: float


class Problem(NamedTuple):
    """One parameter's step, as `adamw` and `adamw8bit` take it."""

    param: Tensor
    extra: Tensor | None
    grad: Tensor
    state: tuple[Tensor, ...]
    """Two moments; with codes and scales of each, four tensors."""
    c: Coefficients


@lru_cache(maxsize=16)  # most parameters of a step ask for the same
def coefficients(
    step: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> Coefficients:
    """Of step number `step`, 1 for the first."""
    return Coefficients(
        decay=1 - lr * weight_decay,
        lerp=1 - beta1,
        beta2=beta2,
        square=1 - beta2,
        step=-lr / (1 - beta1**step),
        root=math.sqrt(1 - beta2**step),
        eps=eps,
    )


def adamw(
    param: Tensor, extra: Tensor | None, grad: Tensor, m: Tensor, v: Tensor, c: Coefficients
) -> None:
    """One step in place. `extra`: the fp32 master or int16 remainder of a bf16 `param`, or None."""
    weight = read(param, extra)
    grad = grad.float()
    m.copy_(_lerp(m, grad, c.lerp))
    v.copy_(_fused(grad * rounded(c.square), grad, v * rounded(c.beta2)))
    # sqrt in fp64, since some fp32 libraries do not round it right; this does.
    root = v.double().sqrt().float()
    denominator = root / torch.full_like(v, c.root) + rounded(c.eps)
    write(param, extra, weight * rounded(c.decay) + (m * rounded(c.step)) / denominator)


def adamw8bit(
    param: Tensor,
    extra: Tensor | None,
    grad: Tensor,
    m_code: Tensor,
    m_scale: Tensor,
    v_code: Tensor,
    v_scale: Tensor,
    c: Coefficients,
) -> None:
    """The same with moments in 8 bits, see `eight_bit`. `param` is (rows, …)."""
    if not param.numel():
        return
    m = eight_bit.decode(m_code.flatten(1), m_scale, signed=True)
    v = eight_bit.decode(v_code.flatten(1), v_scale, signed=False)
    adamw(param, extra, grad, m_wide := m.view(param.shape), v_wide := v.view(param.shape), c)
    beyond = v_wide.isinf() & grad.isfinite()  # the square of a gradient above 1e21
    most = math.sqrt(eight_bit.VAST)
    m_wide = torch.where(beyond, m_wide.clamp(-most, most), m_wide)
    v_wide = torch.where(beyond, eight_bit.VAST, v_wide)
    for wide, code, scale in ((m_wide, m_code, m_scale), (v_wide, v_code, v_scale)):
        found, scales = eight_bit.encode(wide.flatten(1), signed=code is m_code)
        code.copy_(found.view(code.shape))
        scale.copy_(scales)


def read(param: Tensor, extra: Tensor | None) -> Tensor:
    """The fp32 value of a weight. One that was written from outside is not its master's any more:
    then it counts, and the master follows."""
    if extra is None:
        return param.float()
    if extra.dtype == torch.int16:
        return masters.join(param, extra)
    same = masters.cast(extra).view(torch.int16) == param.contiguous().view(torch.int16)
    return torch.where(same, extra, param.float())


def write(param: Tensor, extra: Tensor | None, value: Tensor) -> None:
    """Keeps the fp32 `value` as a weight and what belongs to it."""
    if param.dtype == torch.float32:
        param.copy_(value)
        return
    weight, remainder = masters.split(value)
    param.copy_(weight)
    if extra is not None:
        extra.copy_(remainder if extra.dtype == torch.int16 else masters.canonical(value))


def rounded(x: float) -> float:
    """`x` to fp32."""
    return ctypes.c_float(x).value


def _fused(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """a · b + c of fp32 values, rounded once.

    The product is exact in fp64. The sum is rounded to odd there, so that rounding it to fp32 gives
    what one rounding would: Boldo & Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd" (2008).
    """
    product = a.double() * (b.double() if isinstance(b, Tensor) else b)
    addend = c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    even = (error != 0) & (bits & 1 == 0) & torch.isfinite(total)
    away = (error > 0) == (total > 0)
    return (bits + even * torch.where(away, 1, -1)).view(torch.float64).float()


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """As torch.lerp: from the nearer end."""
    weight = rounded(weight)
    if weight < 0.5:
        return _fused(end - start, weight, start)
    return _fused(end - start, rounded(weight - 1), end)
