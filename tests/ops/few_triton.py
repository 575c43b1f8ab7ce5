"""Run by test_linear_triton.py: products of few tokens against fp64, on a GPU or interpreted."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

from lezero.ops.counts import counts
from lezero.ops.linear import Packed, reference
from lezero.ops.linear.triton_few import Around, best_cut, linear_few, suits
from tests.ops.linear_triton import DEVICE, in_rows
from tests.ops.test_linear import seeded

SIZES = [(1, 40, 512), (3, 33, 96), (17, 64, 1024), (5, 48, 700), (40, 50, 300)]
"""M, N, K."""
AROUND = ["nothing", "norm and residual", "gate and bias"]
KINDS = (torch.bfloat16, torch.float16)
# The interpreter cuts bf16 off where GPUs round.
NEAR = {torch.bfloat16: 1.2e-2 if DEVICE.type == "cpu" else 6e-3, torch.float16: 8e-4}
EPS = 1e-5


def forms() -> Iterator[tuple[int, int, bool]]:
    """Bits, group, whether there are zero points."""
    yield 16, 0, False
    yield from itertools.product((8, 4), (0, 32, 64, 128, 256), (False, True))


def weight_of(
    N: int, K: int, bits: int, group: int, zero: bool, dtype: torch.dtype
) -> tuple[Packed, Tensor]:
    """As kernels read it, and what it stands for, in fp64."""
    if bits == 16:
        weight = seeded(N, K, seed=N).to(dtype).to(DEVICE)
        return Packed(weight, weight, None), weight.double()
    scales = torch.float16 if bits == 4 else torch.float32
    packed = in_rows(N, K, bits, group, zero, scales)
    return packed, reference.dequantize_packed(packed, N, K, bits, group).double()


def products() -> Iterator[tuple[str, bool]]:
    sizes, kinds, counted = map(itertools.cycle, (SIZES, AROUND, (1, 2, 2, 1)))
    for (bits, group, zero), dtype in itertools.product(forms(), KINDS):
        (M, N, K), kind, parts = next(sizes), next(kinds), next(counted)
        assert suits(dtype, bits, group)
        packed, wide = weight_of(N, K, bits, group, zero, dtype)
        gated, normed = "gate" in kind, "norm" in kind
        # Rows that lie apart; those of gates must not.
        x = seeded(M, 2 * K).to(dtype).to(DEVICE)
        x = x if gated else x[:, :K]
        norm = (seeded(K, seed=1).abs() + 0.5).to(dtype).to(DEVICE) if normed else None
        residual = seeded(M, N, seed=2).to(dtype).to(DEVICE) if normed else None
        bias = seeded(N, seed=3).to(dtype).to(DEVICE) if gated else None
        wanted = formula(x, wide, norm, residual, bias)
        cut = best_cut(N, K, bits, group, 132)._replace(parts=parts)
        around = Around(norm, EPS, gated, residual)
        name = f"{M} × {N} × {K}, {bits} bits, group {group}, {zero}, {dtype}, {kind}, {parts}"
        found = linear_few(x, packed, bias, N, K, bits, group, around, cut)
        yield near(name, found, wanted)
    yield "counts are 0 again", not counts(DEVICE).any()
    yield "no tokens", linear_few(x[:0], packed, None, N, K, bits, group).shape == (0, N)


def near(name: str, found: Tensor, wanted: Tensor) -> tuple[str, bool]:
    away = float((found.double() - wanted).norm() / wanted.norm())
    return f"{name}: {away:g} away", found.shape == wanted.shape and away < NEAR[found.dtype]


def formula(
    x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None, bias: Tensor | None
) -> Tensor:
    K, wide = weight.shape[1], x.double()
    if x.shape[1] > K:
        wide = (silu(wide[:, :K]) * wide[:, K:]).to(x.dtype).double()
    if norm is not None:
        factor = torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
        wide = (wide * norm.double()).to(x.dtype).double() * factor
    out = wide @ weight.T
    for added in (bias, residual):
        out = out if added is None else out + added.double()
    return out


if __name__ == "__main__":
    made = list(products())
    wrong = [name for name, right in made if not right]
    print("\n".join(wrong[:20]))
    print(f"{len(wrong)} of {len(made)} differ on {DEVICE}")
    sys.exit(bool(wrong))
