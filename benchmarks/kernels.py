"""Linear kernels on packed weights: share of the memory's bandwidth, speed beside torch's own ops.

    python benchmarks/kernels.py [--quick]

M is the number of tokens. At M = 1 a layer reads its weight once, so the limit is what memory
gives: torch.sum and torch.dot over 1 GiB, before each way in the same rounds, which also takes from
the cache what the way before left there. Bytes are those of the packed weight with its scales. At
M = 256 the limit is the processor's multipliers; torch's bf16 linear is the measure. Weights and
their scales take turns over at least 1 GiB, so that no cache helps. Last, layers of random shapes
are held to the reference by every kernel that this processor runs, every bit of int8 and int4
layers. The last line is one JSON object.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from _table import arguments, columns, finish
from torch import Tensor
from torch.nn.functional import linear

from lezero.ops.build import BuildError
from lezero.ops.linear import Packed, linear_bf16, linear_int, native, pack, pack_bf16, reference
from lezero.ops.quantize import Grid, quantize
from lezero.ops.quantize.grid import SCALE_DTYPES

POOL = 1 << 30
SHAPES = [(4096, 4096), (11008, 4096)]
GROUPS = (32, 64, 128)
Work = Callable[[int], object]


@dataclass
class Way:
    """One layer in one form: `work(i)` runs it with the i-th of `copies` weights."""

    name: str
    work: Work
    copies: int
    bytes: int


class Layers:
    """All forms of a layer of N × K, their weights cut from one pool of bytes."""

    def __init__(self, pool: Tensor, N: int, K: int, M: int) -> None:
        self.pool, self.N, self.K = pool, N, K
        self.x = torch.randn(M, K).bfloat16()
        self.made: dict[tuple[int, int], Tensor] = {}

    def cut(self, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        size = torch.Size(shape).numel() * dtype.itemsize
        whole = self.pool[: len(self.pool) // size * size].view(dtype)
        return list(whole.view(-1, *shape).unbind())

    def ints(self, bits: int, group: int, x_bits: int, zero_point: bool = False) -> Way:
        N, K = self.N, self.K
        weights = self.cut(torch.uint8, N // 16, K // 64 * bits * 2, 16, 4)
        scales = self.scales(len(weights), bits, group)
        zeros = torch.full_like(scales, 7) if zero_point else None

        def work(i: int) -> Tensor:
            packed = Packed(weights[i], scales[i], None if zeros is None else zeros[i])
            options = {"bits": bits, "group": group, "x_bits": x_bits}
            return linear_int(self.x, packed, out_features=N, **options)

        name = f"W{bits}A{x_bits}" + (f" g{group}" if group else "") + " z" * zero_point
        numbers = scales[0].nbytes * (1 + zero_point)
        return Way(name, work, len(weights), weights[0].nbytes + numbers)

    def scales(self, copies: int, bits: int, group: int) -> Tensor:
        """Of each copy, as they are read with it; those of A8 and A16 are the same."""
        if (bits, group) not in self.made:
            shape = (copies, self.N // 16, self.K // group if group else 1, 16)
            dtype = torch.float16 if bits == 4 else torch.float32
            self.made[bits, group] = torch.rand(shape, dtype=dtype).div_(100)
        return self.made[bits, group]

    def bf16(self) -> Way:
        weights = self.cut(torch.bfloat16, self.N // 16, self.K // 2, 16, 2)
        return Way(
            "bf16 packed",
            lambda i: linear_bf16(self.x, weights[i], out_features=self.N),
            len(weights),
            weights[0].nbytes,
        )

    def torch_ways(self) -> list[Way]:
        N, K, x, aten = self.N, self.K, self.x, torch.ops.aten
        bf16, int8 = self.cut(torch.bfloat16, N, K), self.cut(torch.int8, N, K)
        nibbles, scale = self.cut(torch.uint8, N, K // 2), torch.ones(N).bfloat16()
        pairs = torch.ones(K // 64, N, 2).bfloat16()

        def int4pack(i: int) -> Tensor:
            return aten._weight_int4pack_mm_for_cpu(x, nibbles[i], 64, pairs)  # type: ignore[no-any-return]

        return [
            Way("torch bf16", lambda i: linear(x, bf16[i]), len(bf16), bf16[0].nbytes),
            Way("torch int8pack", lambda i: aten._weight_int8pack_mm(x, int8[i], scale),
                len(int8), int8[0].nbytes),
            Way("torch int4pack g64", int4pack, len(nibbles), nibbles[0].nbytes + pairs.nbytes),
            self.onednn(int8),
        ]  # fmt: skip

    def onednn(self, weights: list[Tensor]) -> Way:
        """oneDNN's int8 product. Signed activations would run in its reference code: 100 times
        slower here."""
        ops, (M, K) = torch.ops.onednn, self.x.shape
        packed = [ops.qlinear_prepack(weight, [M, K]) for weight in weights]
        codes = (self.x.float() * 20 + 128).clamp(0, 255).to(torch.uint8)
        scale, zero = torch.ones(self.N), torch.zeros(self.N, dtype=torch.int64)

        def work(i: int) -> Tensor:
            form = (None, 1.0, 0, torch.float32, "none", [], "")
            return ops.qlinear_pointwise(codes, 1.0, 128, packed[i], scale, zero, *form)  # type: ignore[no-any-return]

        return Way("oneDNN qlinear", work, len(packed), weights[0].nbytes)


def seconds(way: Way, most: int) -> float:
    """Of one call, over one turn of the weights (at most `most` calls)."""
    calls = min(way.copies, most)
    way.work(way.copies - 1)
    began = time.perf_counter()
    for i in range(calls):
        way.work(i)
    return (time.perf_counter() - began) / calls


def read_speed(pool: Tensor) -> float:
    """GB/s of reading the whole pool."""
    x = pool.view(torch.float32)
    speeds = []
    for read in (torch.sum, lambda x: torch.dot(x, x)):
        began = time.perf_counter()
        read(x)
        speeds.append(x.nbytes / (time.perf_counter() - began) / 1e9)
    return max(speeds)


def bench(
    pool: Tensor, shape: tuple[int, int], M: int, rounds: int, calls: int
) -> tuple[dict[str, float], dict[str, int], float]:
    """Median seconds and bytes of each way, and the median read bandwidth of the same rounds."""
    layers = Layers(pool, *shape, M)
    ways = [layers.bf16(), layers.ints(8, 0, 8), layers.ints(8, 0, 16)]
    ways += [layers.ints(4, group, x_bits) for x_bits in (8, 16) for group in GROUPS]
    ways = [*layers.torch_ways(), *ways, layers.ints(4, 64, 16, zero_point=True)]
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    reads = []
    for number in range(rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            reads.append(read_speed(pool))
            times[way.name].append(seconds(way, calls))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return medians, {way.name: way.bytes for way in ways}, statistics.median(reads)


def kernels() -> dict[str, Any]:
    """The ops of every kernel that this processor runs, by name."""
    found = {}
    for kernel in native.NATIVE.able():
        with contextlib.suppress(BuildError):
            found[kernel.name] = native.NATIVE.load(kernel)
    return found


def fuzz(count: int, every: dict[str, Any]) -> tuple[int, int]:
    """How many random layers were tried, each by `every` kernel, and how many products differ from
    the reference's."""
    draw, failures = random.Random(0), 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        M, N, K = (draw.randint(1, 300) for _ in range(3))
        bits, group = draw.choice([4, 8]), draw.choice([0, *GROUPS])
        form = draw.choice([(8, 0), (8, 32), (16, 0)])
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        x = torch.randn(M, K, generator=generator).to(dtype)
        weight = torch.randn(N, K, generator=generator)
        bias = torch.randn(N, generator=generator) if draw.random() < 0.5 else None
        kept: Literal["fp32", "fp16"] = draw.choice(["fp32", "fp16"])
        grid = Grid("int4" if bits == 4 else "int8", group or "row", draw.random() < 0.5, kept)
        codes, *numbers = quantize(weight, grid)
        scale, zero = (n if n is None else n.to(SCALE_DTYPES[kept]) for n in numbers)
        packed = pack(codes, scale, zero, bits=bits)
        wanted = reference.linear_int(x, packed, bias, None, N, bits, group, *form)
        plain, near = pack_bf16(weight), 1e-4 if dtype == torch.float32 else 2e-2
        other = reference.linear_bf16(x, plain, bias, N).float()
        for ops in every.values():
            found = ops.linear_int(x, *packed, bias, None, N, bits, group, *form)
            one = ops.linear_bf16(x, plain, bias, N).float()
            failures += not torch.equal(found, wanted)
            # AVX2 takes fp32 as it is; the reference keeps 16 bits of it.
            failures += not torch.allclose(one, other, rtol=near, atol=near * K**0.5)
    return count, failures


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    if not native.NATIVE.available():
        finish(f"no kernel: {native.NATIVE.problem}", {"fuzz_shapes": 0, "fuzz_failures": None})
        return
    quick = options.quick
    rounds = options.rounds or (2 if quick else 5)
    pool = torch.randint(0x30, 0x40, (POOL >> (2 if quick else 0),), dtype=torch.uint8)
    shapes = SHAPES[:1] if quick else SHAPES
    tables, shares, ratios = [], {}, {}
    with torch.inference_mode():
        for N, K in shapes:
            for M, calls in ((1, 1000), (256, 3 if quick else 8)):
                times, sizes, read = bench(pool, (N, K), M, rounds, calls)
                rows = [[f"{N} × {K}, M = {M}", "µs", "GB/s", "share", "GOP/s", "× torch bf16"]]
                for name, s in times.items():
                    speed, ratio = sizes[name] / s / 1e9, times["torch bf16"] / s
                    shares[N, M, name], ratios[N, M, name] = speed / read, ratio
                    gops = 2 * M * N * K / s / 1e9
                    rows.append(
                        [name, f"{s * 1e6:.0f}", f"{speed:.1f}", f"{speed / read:.2f}",
                         f"{gops:.0f}", f"{ratio:.2f}"]
                    )  # fmt: skip
                tables.append(f"{columns(rows)}\nmemory reads at {read:.1f} GB/s\n")
    every = kernels()
    tries, failures = fuzz(40 if quick else 400, every)

    def least(table: dict[tuple[int, int, str], float], M: int, name: str) -> float:
        return min(table[N, M, name] for N, _ in shapes)

    finish(
        f"kernel {native.kernel_name()}, {options.threads} threads\n\n"
        + "\n".join(tables)
        + f"\nrandom shapes by {', '.join(every)}",
        {
            "int8_gemv_bandwidth_share": least(shares, 1, "W8A16"),
            "int4_gemv_bandwidth_share": least(shares, 1, "W4A16 g64"),
            "w8a8_vs_bf16_m256": least(ratios, 256, "W8A8"),
            "w4a8_vs_bf16_m256": least(ratios, 256, "W4A8 g64"),
            "bf16_packed_vs_torch_m256": least(ratios, 256, "bf16 packed"),
            "fuzz_shapes": tries,
            "fuzz_failures": failures,
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    main()
