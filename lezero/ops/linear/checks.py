"""Checks that the ops of this package share; each raises `ConfigError`. `what`: the op."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.linear.layout import BITS, PANEL, SCALE_DTYPES, Packed, in_rows
from lezero.ops.linear.rows import width


def check_devices(what: str, **given: Tensor | None) -> None:
    """All are where the first one is. With one on meta, torch would run no kernel and give memory
    that nobody has written."""
    (first, x), *others = given.items()
    assert x is not None
    for name, other in others:
        if other is not None and other.device != x.device:
            raise ConfigError(
                f"{what}: {name} is on {other.device} and {first} on {x.device}; allowed is one "
                "device for all"
            )


def check_packed(what: str, packed: Packed, K: int, N: int, bits: int, group: int) -> None:
    """Raises `ConfigError` where the tensors are not a weight of N × K."""
    weight, scale, zero = packed
    if not hasattr(group, "__index__"):
        raise ConfigError(
            f"{what}: group is {group!r}; allowed are 0, for a scale a row, and multiples of 32"
        )
    if bits not in BITS or group < 0 or group % 32:
        raise ConfigError(f"{what}: {bits} bits, group {group}; bits are 4 or 8, groups of 32 · n")
    groups = -(-K // group) if group else 1
    shape: tuple[int, ...]
    if in_rows(packed):
        _check_rows(what, weight, K, N, bits, group)
        shape = (N, groups)
    else:
        check_weight(what, weight, torch.uint8, 4, N, 64 * bits // 32)
        shape = (weight.shape[0], groups, PANEL)
    for name, x in (("scale", scale), ("zero", zero)):
        fits = x is None or (
            tuple(x.shape) == shape
            and x.is_contiguous()
            and x.dtype in SCALE_DTYPES
            and x.dtype == scale.dtype
        )
        if not fits:
            assert x is not None
            raise ConfigError(
                f"{what}: {name} is {x.dtype} {tuple(x.shape)}; for {N} × {K} in groups of "
                f"{group or K} it is {shape}, contiguous, fp32, fp16 or bf16"
            )


def check_weight(
    what: str, w: Tensor, dtype: torch.dtype, together: int, N: int, whole: int = 16
) -> None:
    """whole: what the depth is a multiple of, since kernels go from panel to panel by it."""
    fits = w.dim() == 4 and w.shape[2:] == (PANEL, together) and w.is_contiguous()
    fits = fits and w.shape[1] % whole == 0
    if w.dtype != dtype or not fits or not (w.shape[0] - 1) * PANEL < N <= w.shape[0] * PANEL:
        raise ConfigError(
            f"{what}: the weight is {w.dtype} {tuple(w.shape)} for {N} outputs; allowed is what "
            "pack gave for them, contiguous"
        )


def _check_rows(what: str, w: Tensor, K: int, N: int, bits: int, group: int) -> None:
    dtype, shape = torch.int8 if bits == 8 else torch.int32, (N, width(K, bits, group))
    if w.dtype != dtype or tuple(w.shape) != shape or not w.is_contiguous():
        raise ConfigError(
            f"{what}: the weight is {w.dtype} {tuple(w.shape)} for {N} × {K}; in rows it is "
            f"{dtype} {shape}, contiguous"
        )


def check_bias(what: str, bias: Tensor | None, N: int) -> None:
    if bias is not None and (tuple(bias.shape) != (N,) or not bias.is_floating_point()):
        raise ConfigError(
            f"{what}: bias is {bias.dtype} {tuple(bias.shape)}; allowed: floats ({N},)"
        )
