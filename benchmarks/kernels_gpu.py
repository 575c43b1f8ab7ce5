"""Claim: on a GPU, few tokens read packed weights at the memory's speed, many multiply faster.

    python benchmarks/kernels_gpu.py [--quick]

M is the number of tokens. Few of them read a layer's weight once, so the limit is what memory
gives: a copy of 1 GiB, bytes read and written. The bytes of a layer are those of its codes, scales
and zero points; share is how much of that speed they are read with. W8A16 has a scale a row, W4A16
an fp16 scale (and a zero point: z) for each group of 64. Many tokens are limited by the
multipliers: int8 and fp8, with the rounding of the tokens, beside torch's bf16. Weights and scales
take turns over at least 1 GiB, so that no cache helps, in a graph that is repeated, so that no
launch waits for the host. The last line is one JSON object: each figure is the worst over shapes
and numbers of tokens.

Without an NVIDIA GPU there is nothing to measure: figures are null. --quick then runs small layers
on the CPU, which shows that the benchmark works.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _table import arguments, columns, finish
from torch import Tensor
from torch.nn.functional import linear

from lezero.core import device
from lezero.ops.linear import Packed, linear_fp8, linear_int
from lezero.ops.linear.rows import width

POOL, MOST_WEIGHT = 1 << 30, 1 << 27
SHAPES = [(4096, 4096), (11008, 4096), (14336, 4096), (4096, 14336)]
"""N, K."""
FEW, MANY = (1, 4, 16), (1024, 4096)
_GROUP, _LEAST_S = 64, 0.02
MEASURED = {
    "w4a16": "W4A16",
    "w4a16_zero": "W4A16 z",
    "w8a16": "W8A16",
    "w8a8": "W8A8",
    "fp8": "fp8",
}
BASE = "torch bf16"
Found = dict[tuple[int, int, int, str], float]


@dataclass
class Way:
    """One layer in one form: `work(i)` runs it with the i-th of `copies` weights."""

    name: str
    work: Callable[[int], Tensor]
    copies: int
    bytes: int


class Layers:
    """All forms of a layer of N × K for M tokens, their weights cut from pools of `size` bytes."""

    def __init__(self, pools: Pools, N: int, K: int, M: int) -> None:
        self.pools, self.N, self.K = pools, N, K
        self.x = torch.randn(M, K, device=pools.place).bfloat16()

    def few(self) -> list[Way]:
        forms = [("W8A16", 8, 0, False), ("W4A16", 4, _GROUP, False), ("W4A16 z", 4, _GROUP, True)]
        return [self.bf16(), *(self.ints(*form, 16) for form in forms)]

    def many(self) -> list[Way]:
        return [self.bf16(), self.ints("W8A8", 8, 0, False, 8), self.fp8()]

    def bf16(self) -> Way:
        weights = self.pools.cut(self.pools.floats, self.N, self.K)
        return Way(BASE, lambda i: linear(self.x, weights[i]), len(weights), weights[0].nbytes)

    def ints(self, name: str, bits: int, group: int, zero: bool, x_bits: int) -> Way:
        N, K = self.N, self.K
        dtype = torch.int8 if bits == 8 else torch.int32
        weights = self.pools.cut(self.pools.codes.view(dtype), N, width(K, bits, group))
        shape = (len(weights), N, K // group if group else 1)
        kept = torch.float16 if bits == 4 else torch.float32
        scales = torch.rand(shape, device=self.pools.place, dtype=kept).div_(100)
        zeros = torch.randint_like(scales, 16) if zero else None

        def work(i: int) -> Tensor:
            packed = Packed(weights[i], scales[i], None if zeros is None else zeros[i])
            options = {"bits": bits, "group": group, "x_bits": x_bits}
            return linear_int(self.x, packed, out_features=N, **options)

        read = weights[0].nbytes + scales[0].nbytes * (2 if zero else 1)
        return Way(name, work, len(weights), read)

    def fp8(self) -> Way:
        weights = self.pools.cut(self.pools.fp8, self.N, self.K)
        scales = torch.rand(len(weights), self.N, 1, device=self.pools.place).div_(100)
        read = weights[0].nbytes + scales[0].nbytes
        return Way("fp8", lambda i: linear_fp8(self.x, weights[i], scales[i]), len(weights), read)


class Pools:
    """Random weights of each kind, at least `size` bytes of each turn."""

    def __init__(self, size: int, most: int, place: torch.device) -> None:
        self.size, self.place = size, place
        full = size + most
        self.codes = torch.randint(0, 256, (full,), dtype=torch.uint8, device=place)
        self.floats = torch.randn(full // 2, device=place, dtype=torch.bfloat16)
        self.fp8 = torch.cat([self.floats.to(torch.float8_e4m3fn)] * 2)

    def cut(self, pool: Tensor, *shape: int) -> list[Tensor]:
        numel = torch.Size(shape).numel()
        count = -(-self.size // (numel * pool.itemsize))
        return list(pool[: count * numel].view(count, *shape).unbind())


def repeated(way: Way) -> Callable[[], object]:
    """What runs one turn of the weights."""

    def turn() -> Tensor:
        for i in range(way.copies - 1):
            way.work(i)
        return way.work(way.copies - 1)

    return device.Graphs()(turn)[0] if device.accelerator() == "cuda" else turn


def seconds(turn: Callable[[], object]) -> float:
    """Of one turn; so many together that waiting for the end of them is no part of it."""
    times, took = 1, 0.0
    while True:
        device.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            turn()
        device.synchronize()
        took = time.perf_counter() - began
        if took > _LEAST_S / 2:
            return took / times
        times = max(2 * times, int(times * _LEAST_S / max(took, 1e-6)))


def bench(ways: list[Way], rounds: int) -> dict[str, float]:
    """Median seconds of a call of each way, in turns."""
    turns = {way.name: repeated(way) for way in ways}
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            times[way.name].append(seconds(turns[way.name]) / way.copies)
    return {name: statistics.median(found) for name, found in times.items()}


def copy_speed(size: int, place: torch.device, rounds: int) -> float:
    """Bytes a second that a copy of `size` bytes reads and writes."""
    source = torch.ones(size // 8, dtype=torch.float64, device=place)
    target = torch.empty_like(source)
    return (
        2 * size / statistics.median(seconds(lambda: target.copy_(source)) for _ in range(rounds))
    )


def measure(
    pools: Pools, shapes: list[tuple[int, int]], tokens: tuple[int, ...], rounds: int
) -> tuple[str, Found, Found]:
    """A table, and shares of the copy's speed and speeds over bf16's by N, K, M and way."""
    read = copy_speed(pools.size, pools.place, rounds)
    tables, shares, ratios = [], Found(), Found()
    for N, K in shapes:
        for M in tokens:
            layers = Layers(pools, N, K, M)
            ways = layers.many() if M in MANY else layers.few()
            times = bench(ways, rounds)
            rows = [[f"{N} × {K}, M = {M}", "µs", "GB/s", "share", "TFLOP/s", "× bf16"]]
            for way in ways:
                s = times[way.name]
                share, ratio = way.bytes / s / read, times[BASE] / s
                shares[N, K, M, way.name], ratios[N, K, M, way.name] = share, ratio
                rows.append(
                    [way.name, f"{s * 1e6:.1f}", f"{way.bytes / s / 1e9:.0f}", f"{share:.2f}",
                     f"{2 * M * N * K / s / 1e12:.1f}", f"{ratio:.2f}"]
                )  # fmt: skip
            tables.append(columns(rows))
    tables.append(f"a copy reads and writes {read / 1e9:.0f} GB/s")
    return "\n\n".join(tables), shares, ratios


def figures(shares: Found, ratios: Found) -> dict[str, Any]:
    def least(table: Found, name: str) -> float | None:
        return min((x for (*_, way), x in table.items() if way == name), default=None)

    found: dict[str, Any] = {}
    for key, name in MEASURED.items():
        if "a16" in key:
            found[f"{key}_share"] = least(shares, name)
        found[f"{key}_vs_bf16"] = least(ratios, name)
    few = {place: x for place, x in shares.items() if place[2] in FEW}
    return {**found, "bf16_share": least(few, BASE)}


def missing() -> str:
    if device.accelerator() != "cuda":
        return "no NVIDIA GPU on this machine"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    rounds = options.rounds or (2 if options.quick else 7)
    why = missing()
    table, shares, ratios = "", Found(), Found()
    with torch.inference_mode():
        if not why:
            shapes = SHAPES[:1] if options.quick else SHAPES
            tokens = (1, 1024) if options.quick else (*FEW, *MANY)
            pools = Pools(POOL, MOST_WEIGHT, device.device())
            table, shares, ratios = measure(pools, shapes, tokens, rounds)
        elif options.quick:
            pools = Pools(1 << 17, 1 << 17, torch.device("cpu"))
            table, *_ = measure(pools, [(128, 256)], (1, 1024), rounds)
            table += "\n\nsmall layers on the CPU, which say nothing of a GPU"
    if why:
        table += f"\nmissing: {why}; figures are null"
    finish(table.strip(), {**figures(shares, ratios), "rounds": rounds})


if __name__ == "__main__":
    main()
