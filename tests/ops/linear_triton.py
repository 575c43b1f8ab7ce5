"""Run by test_linear_triton.py: Triton kernels against the reference, on a GPU or interpreted."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from lezero.core import device
from lezero.ops.linear import (
    Packed,
    accelerator,
    reference,
    to_rows,
    triton_rows,
    triton_tokens,
    triton_w8a8,
)
from lezero.ops.quantize.tokens import quantize_tokens
from tests.ops.test_linear import FLOATS, packed, seeded

DEVICE = device.device()
SHAPES = [(1, 1), (40, 96), (33, 70), (5, 700), (17, 513)]
"""N, K."""
SPOILT = (float("nan"), float("inf"), -float("inf"), 3e38, 1e-40, 0.0)


def in_rows(N: int, K: int, bits: int, group: int, zero: bool, dtype: torch.dtype) -> Packed:
    made = to_rows(packed(N, K, bits, group, zero, dtype), N, K, bits, group)
    return Packed(*(x if x is None else x.to(DEVICE) for x in made))  # type: ignore[arg-type]


def equal(one: Tensor, two: Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    if one.dtype == torch.bfloat16 and DEVICE.type == "cpu":  # the interpreter cuts off, GPUs round
        return torch.allclose(one, two, rtol=2.0**-7, atol=0, equal_nan=True)
    return torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))


def weights() -> Iterator[tuple[str, bool]]:
    kinds = itertools.product(SHAPES, (4, 8), (0, 32, 64, 96), (False, True))
    for ((N, K), bits, group, zero), dtype in zip(kinds, itertools.cycle(FLOATS), strict=False):
        name = f"{N} × {K}, {bits} bits, group {group}, {zero}, {dtype}"
        weight = in_rows(N, K, bits, group, zero, dtype)
        wanted = reference.dequantize_packed(weight, N, K, bits, group).to(dtype)
        yield name, equal(triton_rows.dequantize(weight, N, K, bits, group, dtype), wanted)
        ids = torch.tensor([0, N - 1, N // 2, 0] * 5, device=DEVICE)
        found = triton_rows.embedding(ids, weight, K, bits, group, dtype)
        yield f"rows of {name}", equal(found, wanted[ids])
    weight = in_rows(20, 70, 4, 32, True, torch.float32)
    ids = torch.tensor([3, -1, 20], device=DEVICE)
    found = triton_rows.embedding(ids, weight, 70, 4, 32, torch.bfloat16)
    yield "ids that are none", bool(found[0].isfinite().all() and found[1:].isnan().all())
    yield "no ids", not triton_rows.embedding(ids[:0], weight, 70, 4, 32, torch.float16).numel()


def tokens() -> Iterator[tuple[str, bool]]:
    scales = (None, 0.02, 0.0, 1e-39, float("nan"), 3e38)
    for K, dtype, given in itertools.product((1, 70, 256), FLOATS, scales):
        scale = None if given is None else torch.tensor([given], device=DEVICE)
        x = seeded(len(SPOILT) + 5, K)
        for row, value in enumerate(SPOILT):
            x[row, K // 2] = value
        # Halves, which are rounded to even: of 127 a step is 1.
        x[-2], x[-1] = torch.arange(K) % 253 - 126.5, torch.arange(K) * 1e-41
        x[-2, 0] = 127.0
        x = x.to(dtype).to(DEVICE)
        wanted, steps = quantize_tokens(x, scale)
        columns = -(-K // 16) * 16
        found, at = triton_tokens.quantize_tokens(x, scale, columns)
        name = f"tokens {K} {dtype} {given}"
        yield f"{name}: codes", equal(found[:, :K], wanted)
        yield f"{name}: scales", equal(at, steps)
        yield f"{name}: padding", found.shape[1] == columns and not found[:, K:].any()
    at_once, triton_tokens._AT_ONCE = triton_tokens._AT_ONCE, 64
    x = seeded(3, 200).to(DEVICE)
    x[1, 150] = 90.0
    x[2, 199] = float("nan")
    found = triton_tokens.quantize_tokens(x, None, 200)
    yield "tokens in parts", all(map(equal, found, quantize_tokens(x)))
    triton_tokens._AT_ONCE = at_once


WHOLE = [(1, 1, 16), (16, 40, 96), (16, 70, 512), (17, 257, 208), (128, 64, 256), (129, 300, 384)]
WHOLE += [(1100, 130, 144), (3, 5, 5008)]
"""M, N, K: every tile, whole and ragged, and more tiles of tokens than run together."""


def whole_numbers() -> Iterator[tuple[str, bool]]:
    draw = torch.Generator().manual_seed(0)
    kinds = zip(itertools.product(WHOLE, (False, True)), itertools.cycle(FLOATS), strict=False)
    for ((M, N, K), with_bias), dtype in kinds:
        a, w = (torch.randint(-127, 128, (n, K), generator=draw).to(torch.int8) for n in (M, N))
        a[0], w[0] = 127, -127  # the largest sum
        token, scale = seeded(M, seed=M), seeded(N, seed=N)[:, None].to(dtype)
        token[1:2] = float("nan")
        bias = seeded(N, seed=2).to(dtype).to(DEVICE) * 1e3 if with_bias else None
        a, w, token, scale = (x.to(DEVICE) for x in (a, w, token, scale))
        factor = token[:, None] * scale.float().T
        wanted = reference.finish((a.double() @ w.double().T).float(), factor, bias, dtype)
        found = triton_w8a8.linear_w8a8(a, token, w, scale, bias, dtype)
        yield f"whole {M} {N} {K} {dtype} {with_bias}", equal(found, wanted)
    none = triton_w8a8.linear_w8a8(a[:0], token[:0], w, scale, None, torch.float16)
    yield "no tokens", none.shape == (0, len(w))


def layers() -> Iterator[tuple[str, bool]]:
    """All together, as accelerators run them."""
    accelerator.triton_runs = lambda place: True
    kinds = itertools.product(
        (3, 70), ((4, 32, True), (4, 0, False), (8, 0, False)), FLOATS, (8, 16)
    )
    for M, (bits, group, zero), dtype, x_bits in kinds:
        if DEVICE.type == "cpu" and (M, bits, x_bits, dtype) == (3, 8, 16, torch.bfloat16):
            continue  # the interpreter takes whole numbers for the bits of bf16
        N, K = 40, 700
        weight, x = (
            in_rows(N, K, bits, group, zero, torch.float32),
            seeded(M, K).to(dtype).to(DEVICE),
        )
        rest = (seeded(N).to(DEVICE), None, N, bits, group, x_bits)
        wanted = reference.linear_int(x, weight, *rest).float()
        found = accelerator.linear_int(x, weight, *rest)
        near = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        away = float((found.float() - wanted).abs().max() / wanted.abs().max())
        name = f"layer {M} {bits} {group} {zero} {dtype} {x_bits}"
        yield f"{name}: {away:g} away", found.dtype == dtype and away < near
        if bits == 8 and x_bits == 8:
            yield f"{name}: equal", equal(found, wanted.to(dtype))


if __name__ == "__main__":
    made = list(itertools.chain(weights(), tokens(), whole_numbers(), layers()))
    wrong = [name for name, right in made if not right]
    print("\n".join(wrong[:20]))
    print(f"{len(wrong)} of {len(made)} differ on {DEVICE}")
    sys.exit(bool(wrong))
