"""`least_error` and `half_quadratic`: the kernel of this machine or the reference.

A group's candidates, twenty scales and twenty zero points, are tried while it lies in the first
cache; in PyTorch each of them is nine passes over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.grid_fit import reference
from lezero.ops.grid_fit.native import NATIVE

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def least_error(
    w_GE: Tensor,
    scale_G: Tensor,
    zero_G: Tensor | None,
    *,
    code_range: tuple[int, int],
    kept: torch.dtype,
    steps: int,
    importance_GE: Tensor | None = None,
) -> Tensor:
    """Scales (fp32, G): of `steps` shares of `scale_G`, from 1 down to a half, that of the least
    squared error; `importance_GE` weighs its terms.

    w_GE: fp32. zero_G: zero points, which stay; None: 0. code_range: lowest and highest code.
    kept: what scales are rounded to before they are tried. A group whose scale is not a number
    keeps it. Raises `ConfigError` for other shapes and types.
    """
    _check("least_error", w_GE, scale_G, zero_G, kept)
    if importance_GE is not None or not _native(w_GE):
        how = (code_range, kept, steps, importance_GE)
        return reference.least_error(w_GE, scale_G, zero_G, *how)
    found = scale_G.clone(memory_format=torch.contiguous_format)
    zero = None if zero_G is None else zero_G.contiguous()
    NATIVE.ops.least_error(w_GE.contiguous(), found, zero, *code_range, _KINDS[kept], steps)
    return found


def half_quadratic(
    w_GE: Tensor,
    scale_G: Tensor,
    zero_G: Tensor,
    *,
    code_range: tuple[int, int],
    kept: torch.dtype,
    rounds: int,
) -> tuple[Tensor, Tensor]:
    """Codes (uint8, G × E) and zero points (fp32, G; not whole) by half-quadratic splitting.

    Badri and Shaji, 2023, "Half-Quadratic Quantization of Large Machine Learning Models"
    (mobiusml.github.io/hqq_blog): ‖w - (code - z) s‖_p with p = 0.7. In turns, for a growing β,

        w_e = shrink(w - w_r, β) = sign(x) relu(|x| - |x|^(p-1) / β)     (their equation 4)
        z   = mean over the group of (code - (w - w_e) / s)              (their equation 8)

    as long as the group's mean |error| falls, `rounds` at most. w_GE: fp32; zero_G: where to begin;
    kept: what zero points are rounded to. Raises `ConfigError` for other shapes and types.
    """
    _check("half_quadratic", w_GE, scale_G, zero_G, kept)
    if not _native(w_GE):
        how = (code_range, kept, rounds)
        look = w_GE.device.type == "cpu"
        return reference.half_quadratic(w_GE, scale_G, zero_G, *how, look=look)
    zero = zero_G.clone(memory_format=torch.contiguous_format)
    codes = torch.empty(w_GE.shape, dtype=torch.uint8, device=w_GE.device)
    given = (w_GE.contiguous(), scale_G.contiguous(), zero, codes)
    NATIVE.ops.half_quadratic(*given, *code_range, _KINDS[kept], rounds)
    return codes, zero


def _native(w_GE: Tensor) -> bool:
    return w_GE.device.type == "cpu" and NATIVE.available()


def _check(
    what: str, w_GE: Tensor, scale_G: Tensor, zero_G: Tensor | None, kept: torch.dtype
) -> None:
    if w_GE.dim() != 2 or w_GE.dtype != torch.float32 or not w_GE.shape[1]:
        raise ConfigError(
            f"{what}: weights of {w_GE.dtype} {tuple(w_GE.shape)}; allowed are float32, (G, E)"
        )
    for name, x in (("scale", scale_G), ("zero", zero_G)):
        if x is not None and (x.shape != w_GE.shape[:1] or x.dtype != torch.float32):
            raise ConfigError(
                f"{what}: {name} is {x.dtype} {tuple(x.shape)}; allowed is float32, "
                f"({w_GE.shape[0]},)"
            )
    if kept not in _KINDS:
        raise ConfigError(f"{what}: kept is {kept}; allowed are {', '.join(map(str, _KINDS))}")
