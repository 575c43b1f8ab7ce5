"""Products of up to 16 tokens with a weight, and what stands around them in a decoder, on NVIDIA.

    out = norm(x) wᵀ + bias + residual        or, of gates and what they multiply, silu(g) u

The weight, bf16, fp16 or codes in the row layout of `rows.py`, is read once, straight into the
order in which the matrix units want it (`few.cu`); that is the time. Results do not depend on the
number of tokens. A launch asks for its weights before those ahead of it have ended.

A norm is in two places: who makes its tokens also writes them times the norm's weight, and sums of
squares of parts of each; who takes them multiplies what comes of them by their factor.

Letters: M tokens, N outputs, K inputs, P sums of squares of a token.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lezero.core.device import processors
from lezero.ops.cuda_source import kernel
from lezero.ops.linear.layout import Packed
from lezero.ops.linear.rows import run_of

MOST_TOKENS = 16
_ROWS = 16  # outputs of a block
_SOURCE = Path(__file__).with_name("few.cu")
_KEPT = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_DTYPES = (torch.bfloat16, torch.float16)
_GROUPS = (0, 32, 64, 128, 256, 512)
_INPUTS, _STAGED = 1 << 15, 1 << 14  # at most, so that shared memory is enough everywhere


class Normed(NamedTuple):
    """Tokens (M, K) times a norm's weight, and sums of squares (P, M), fp32, of the tokens before:
    rsqrt(Σ_P squares / K + eps) is the factor that they lack."""

    tokens: Tensor
    squares: Tensor


class Cut(NamedTuple):
    """Warps of a block; blocks that registers of a multiprocessor must be enough for; whether there
    are no more blocks than those, which then take one tile after another; and whether tokens are
    put in shared memory."""

    warps: int
    blocks: int
    stays: bool
    staged: bool


class _Weights(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "scale", "zero")),
        ("line_bytes", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("N", "K", "groups")),
    ]


class _Around(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bias", "residual", "squares", "next_norm")),
        ("next", ctypes.c_void_p),
        ("next_squares", ctypes.c_void_p),
        ("parts", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


def suits(dtype: torch.dtype, in_features: int, bits: int, group: int) -> bool:
    """Whether there is a kernel: for 16-bit tokens, inputs in multiples of 32, up to
    32,768, known groups."""
    known = group in _GROUPS and not (bits == 8 and group == 32)
    return (
        dtype in _DTYPES
        and in_features % 32 == 0
        and in_features <= _INPUTS
        and (bits == 16 or known)
    )


def aligned(packed: Packed) -> bool:
    """Whether its parts begin where kernels may read 16 bytes at once; a view may not."""
    return not any(part is not None and part.data_ptr() % 16 for part in packed)


def linear_few(
    x: Tensor | Normed,
    M: int,
    weight: Packed,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    bits: int,
    group: int,
    eps: float = 0.0,
    gated: bool = False,
    early: bool = True,
) -> Tensor:
    """(M, N) in the dtype of x, (K / 16, pad, 16), or where `gated` (N / 32, pad, 16): the first
    half of the outputs are the gates.

    eps: of a norm that x lacks the factor of. early: nothing that may still run writes the weight.
    """
    call = _Call(x, M, weight, bias, out_features, in_features, bits, group)
    call.around.eps = eps
    shape = (call.outputs(gated) // 16, call.pad, 16) if gated else (M, out_features)
    return call.launch(call.tokens.new_empty(shape), early, gated)


def linear_normed(
    x: Tensor,
    M: int,
    weight: Packed,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    bits: int,
    group: int,
    residual: Tensor,
    norm: Tensor,
) -> tuple[Tensor, Normed]:
    """(M, N), with `residual` (M, N) added to the rounded product, and the same as tokens of a norm
    of weight `norm` (N,). Nothing that may still run writes the weight."""
    assert out_features % 16 == 0
    assert residual.dtype == norm.dtype
    call = _Call(x, M, weight, bias, out_features, in_features, bits, group)
    sums = call.tokens.new_empty(call.blocks(False), M, dtype=torch.float32)
    following = Normed(call.tokens.new_empty(out_features // 16, call.pad, 16), sums)
    call.around.residual, call.around.next_norm = residual.data_ptr(), norm.data_ptr()
    call.around.next, call.around.next_squares = (part.data_ptr() for part in following)
    out = call.launch(call.tokens.new_empty(M, out_features), True, False)
    return out, following


class _Call:
    """One product: what both forms have in common."""

    def __init__(
        self,
        x: Tensor | Normed,
        M: int,
        weight: Packed,
        bias: Tensor | None,
        N: int,
        K: int,
        bits: int,
        group: int,
    ) -> None:
        self.around = around = _Around()
        self.tokens = x.tokens if isinstance(x, Normed) else x
        assert self.tokens.is_contiguous()
        self.pad, self.M, self.N, self.K = self.tokens.shape[1], M, N, K
        self.weight, self.bits, self.group = weight, bits, group
        if isinstance(x, Normed):
            around.squares, around.parts = x.squares.data_ptr(), len(x.squares)
        self._bias = None if bias is None else bias.to(self.tokens.dtype)
        if self._bias is not None:
            around.bias = self._bias.data_ptr()

    def outputs(self, gated: bool) -> int:
        return self.N // 2 if gated else self.N

    def blocks(self, gated: bool) -> int:
        return -(-self.outputs(gated) // (_ROWS // 2 if gated else _ROWS))

    def launch(self, out: Tensor, early: bool, gated: bool) -> Tensor:
        w, scale, zero = self.weight
        place, J, K = out.device, run_of(self.group), self.K
        step, blocks = step_of(self.bits, self.group), self.blocks(gated)
        steps = -(-K // step)
        cut = best_cut(self.bits, K, blocks, steps, self.pad, early, processors(place))
        whole = self.bits < 16
        given = {
            **{"BITS": self.bits, "J": J, "GROUP": self.group if whole else 0},
            **{"SCALE": _KEPT[scale.dtype] if whole else 0, "HALF": out.dtype == torch.float16},
            **{"EVEN": K % step == 0, "PAD": self.pad, "ZERO": whole and zero is not None},
            **{"BIAS": self.around.bias is not None, "PAIRED": gated, "EARLY": early},
            **{"NORMED": self.around.squares is not None, "NEXT": self.around.next is not None},
            **{"RESIDUAL": self.around.residual is not None},
            **{"WARPS": cut.warps, "BLOCKS": cut.blocks, "STAGED": cut.staged},
        }
        ours = kernel(_SOURCE, "few", place, {key: int(value) for key, value in given.items()})
        zeros = 0 if zero is None else zero.data_ptr()
        line = w.stride(0) * w.element_size()
        weights = _Weights(w.data_ptr(), scale.data_ptr(), zeros, line, self.N, K, scale.shape[-1])
        arguments = [self.tokens, weights, out, ctypes.c_int(self.M), self.around]
        grid = (min(blocks, cut.blocks * processors(place)) if cut.stays else blocks,)
        shared = shared_bytes(self.bits, self.group, K, self.pad, cut.staged, bool(given["ZERO"]))
        ours.launch(place, grid, 32 * cut.warps, arguments, early=True, shared=shared)
        return out


def step_of(bits: int, group: int) -> int:
    """Inputs that a warp takes at once."""
    return {4: 8 * run_of(group), 8: 256, 16: 128}[bits]


def shared_bytes(bits: int, group: int, K: int, pad: int, staged: bool, zero: bool) -> int:
    """Of a block's tokens, a little apart, and of their sums where zero points ask for them."""
    step = step_of(bits, group)
    span = step // group if 0 < group < step else 1
    tokens = K // 16 * (32 * pad + (64 if pad > 1 else 0)) if staged else 0
    return tokens + (-(-K // step) * span * 4 * max(8, pad) if zero else 0)


def best_cut(
    bits: int, K: int, tiles: int, steps: int, pad: int, early: bool, processors: int
) -> Cut:
    """Of the cuts that were measured, on an H100.

    Blocks that stay read faster alone, but leave no room for the next launch to begin early: for
    launches that follow each other a block a tile was faster in all.
    """
    wide = steps >= 16 and (tiles <= processors or (bits == 16 and not early))
    warps = 16 if wide else min(8, steps)
    # Registers of a thread, in warps that there is room for.
    room = 8 if bits == 4 and pad == 16 and not wide and not early else 16
    return Cut(
        warps,
        max(1, room // warps),
        not early,
        bits == 4 and pad == 1 and not early and K <= _STAGED,
    )


def sliced(x_MK: Tensor) -> Tensor:
    """(K / 16, pad, 16) of (M, K): `padded(M)` tokens, those beyond M are anything."""
    M, K = x_MK.shape
    if M == 1 and x_MK.data_ptr() % 16 == 0:
        return x_MK.reshape(K // 16, 1, 16)
    out = x_MK.new_empty(K // 16, padded(M), 16)
    out[:, :M] = x_MK.view(M, K // 16, 16).transpose(0, 1)
    return out


def padded(count: int) -> int:
    return 1 if count == 1 else 8 if count <= 8 else 16
