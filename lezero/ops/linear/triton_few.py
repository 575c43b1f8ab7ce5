"""Products of few tokens with a weight, and what stands around them in a decoder, in one launch.

    out = norm(x) wᵀ + bias + residual

The weight is read once: that is the time. It is bf16 or fp16 (N, K) or in the row layout of
`rows.py`. A program takes BN outputs, all tokens (16 or 32 at a time, on the matrix units) and a
part of the inputs; of the programs of one tile of outputs the last to end adds the parts, in their
order, so that results do not depend on which one that is, nor on the number of tokens. On NVIDIA up
to 16 tokens have a faster kernel, `cuda_few.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lezero.core.device import processors
from lezero.ops.counts import MOST_COUNTED, counts
from lezero.ops.linear import triton_few_kernel as kernel
from lezero.ops.linear.layout import Packed
from lezero.ops.linear.rows import run_of

MOST_TOKENS = 64
_GATES = 1024  # of a program
_GROUPS = (0, 32, 64, 128, 256, 512)


class Around(NamedTuple):
    """What stands around a product. `norm`: (K,) weight of an RMS norm of x, with `eps`. `gated`: x
    is (M, 2 K), a gate and what it multiplies. `residual`: (M, N), added to the rounded product."""

    norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    residual: Tensor | None = None


_NOTHING = Around()


class Cut(NamedTuple):
    """How the work is cut: outputs and inputs of a tile, parts of the inputs, stages, warps."""

    outputs: int
    inputs: int
    parts: int
    stages: int
    warps: int


def suits(dtype: torch.dtype, bits: int, group: int) -> bool:
    """Whether there is a kernel: for 16-bit tokens and groups of 32, 64, 128, 256, 512 or a row."""
    return dtype in (torch.bfloat16, torch.float16) and (bits == 16 or group in _GROUPS)


def linear_few(
    x_MK: Tensor,
    weight: Packed,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    bits: int,
    group: int,
    around: Around = _NOTHING,
    cut: Cut | None = None,
) -> Tensor:
    """(M, N) in x's dtype, bf16 or fp16, for up to 64 tokens; rows of `x_MK` may lie apart.

    `bits` 16: `weight.weight` is (N, K) in x's dtype, scale and zero are not looked at. `suits`
    says which groups there are.
    """
    N, K = out_features, in_features
    if not len(x_MK):
        return x_MK.new_empty(0, N)
    if around.gated:
        x_MK = _gated(x_MK, K)
    cut = cut or best_cut(N, K, bits, group, processors(x_MK.device))
    return _tiled(x_MK, weight, bias, (N, K, bits, group), around, cut)


def _tiled(
    x_MK: Tensor,
    weight: Packed,
    bias: Tensor | None,
    sizes: tuple[int, int, int, int],
    around: Around,
    cut: Cut,
) -> Tensor:
    w, scale, zero = weight
    M, (N, K, bits, group) = len(x_MK), sizes
    block = 8 * run_of(group)
    unit = block if bits == 4 else cut.inputs
    part = triton.cdiv(triton.cdiv(K, unit), cut.parts) * unit
    tokens = 16 if M <= 16 or bits == 4 else 32
    grid = (triton.cdiv(N, cut.outputs), cut.parts, triton.cdiv(M, tokens))
    assert grid[0] * grid[2] <= MOST_COUNTED
    out = x_MK.new_empty(M, N)
    launch: Any = kernel.few[grid]
    with torch.accelerator.device_index(x_MK.device.index):  # Triton takes the current one
        launch(
            *(x_MK, x_MK if around.norm is None else around.norm, w, scale),
            *(scale if zero is None else zero, x_MK if bias is None else bias),
            *(x_MK if around.residual is None else around.residual, out),
            *(*_shared(x_MK, N, grid[0], cut.parts), M, N, K, x_MK.stride(0), w.shape[1]),
            *(scale.shape[-1], group, around.eps, part),
            BITS=bits,
            GROUPED=bits < 16 and group > 0,
            ZERO=bits < 16 and zero is not None,
            BIAS=bias is not None,
            NORM=around.norm is not None,
            RESIDUAL=around.residual is not None,
            EVEN=K % unit == 0,
            TOKENS=tokens,
            LOADED=1 if M == 1 else tokens,
            BN=cut.outputs,
            BK=unit,
            J=run_of(group),
            IN_BLOCK=max(1, block // group) if group else 1,
            PARTS=cut.parts,
            STAGES=cut.stages,
            ASM=x_MK.dtype == torch.bfloat16 and x_MK.is_cuda and torch.version.cuda is not None,
            WIDE=x_MK.device.type == "cpu",
            num_warps=cut.warps,
        )
    return out


def _shared(x_MK: Tensor, N: int, tiles: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """What programs of one tile leave for the last of them: sums, squares, and how many ended."""
    if parts == 1:
        return x_MK, x_MK, x_MK
    partial = x_MK.new_empty(parts, len(x_MK), N, dtype=torch.float32)
    squares = x_MK.new_empty(tiles, parts, len(x_MK), dtype=torch.float32)
    return partial, squares, counts(x_MK.device)


def _gated(x: Tensor, width: int) -> Tensor:
    out = x.new_empty(len(x), width)
    launch: Any = kernel.gate[(triton.cdiv(width, _GATES), len(x))]
    with torch.accelerator.device_index(x.device.index):
        launch(x, out, width, TILE=_GATES)
    return out


def best_cut(N: int, K: int, bits: int, group: int, processors: int) -> Cut:
    """Some programs a processor, each with as many bytes on their way as memory's latency asks for.
    Of the cuts that were measured on an H200; not a question of the number of tokens, see above."""
    enough = 2 * processors
    if bits == 4:
        outputs, inputs, stages, warps = 64, 8 * run_of(group), 3, 4
        enough = 3 * processors // 2
    elif bits == 8 and N >= 1 << 14:
        outputs, inputs, stages, warps = 64, min(256, group or 256), 4, 4
    elif bits == 8:
        outputs, inputs, stages, warps = 32, min(512, group or 512), 3, 4
    elif N >= 3 << 13:
        outputs, inputs, stages, warps = 64, 128, 4, 4
    elif N >= 1 << 13:
        outputs, inputs, stages, warps = 32, 256, 4, 4
    else:
        outputs, inputs, stages, warps = 16, 256, 4, 2
    parts, tiles = 1, triton.cdiv(N, outputs)
    while parts < 8 and parts * tiles < enough and 2 * parts * inputs <= K:
        parts *= 2
    return Cut(outputs, inputs, parts, stages, warps)
