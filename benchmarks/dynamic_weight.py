"""DynamicWeightGenerator: the fast path against a loop over the samples, in one run.

    python benchmarks/dynamic_weight.py [--quick]

Each row is one forward and backward pass; the ways are interleaved and the medians compared.
`unfold + bmm` is a third way that was considered. The last line is one JSON object:
`fast_vs_loop` is the geometric mean of (loop time / fast time), `fast_vs_loop_min` the worst row,
and `difference_fp64` the largest difference of outputs and gradients in double precision.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lezero.nn import DynamicWeightGenerator

CASES = [
    (32, 64, 8, 8),
    (8, 32, 16, 16),
    (16, 64, 32, 32),
    (8, 256, 14, 14),
    (32, 64, 2, 2),
    (1, 64, 32, 32),
    (16, 64, 128),
    (32, 256, 16),
    (64, 256),
    (256, 512),
]
QUICK = [(8, 16, 8, 8), (4, 16, 2, 2), (4, 16, 24), (16, 32)]


def unfold(module: DynamicWeightGenerator, x: Tensor) -> Tensor:
    """Patches as columns, one matrix product a sample."""
    pi = module.gate_values(x)
    w = (pi @ module.weight.flatten(1)).unflatten(1, module.weight.shape[1:])
    assert module.bias is not None
    b = (pi @ module.bias).unsqueeze(2)
    size = (1, module.kernel_size) if x.ndim == 3 else module.kernel_size
    pad = (0, module.kernel_size // 2) if x.ndim == 3 else module.kernel_size // 2
    image = x.unsqueeze(2) if x.ndim == 3 else x
    columns = x.unsqueeze(2) if x.ndim == 2 else F.unfold(image, size, padding=pad)
    return torch.baddbmm(b.to(x.dtype), w.to(x.dtype), columns).reshape(x.shape)


def one_pass(run: Callable[[Tensor], Tensor], x: Tensor, bf16: bool) -> float:
    x = x.detach().requires_grad_()
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        y = run(x)
    y.float().sum().backward()
    return time.perf_counter() - start


def measure(shape: tuple[int, ...], bf16: bool, rounds: int) -> dict[str, float]:
    """Median milliseconds of each way, interleaved."""
    module = DynamicWeightGenerator(shape[1], dims=len(shape) - 2)
    x = torch.randn(shape)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "fast": module,
        "loop": module.reference,
        "unfold + bmm": lambda x: unfold(module, x),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(rounds + 2):
        turn = step % len(ways)  # who comes first pays for what the last one left in the cache
        for name in [*ways, *ways][turn : turn + len(ways)]:
            taken = one_pass(ways[name], x, bf16)
            if step >= 2:
                seconds[name].append(taken)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def difference(shape: tuple[int, ...]) -> float:
    """Largest absolute difference of the fast path and the loop in fp64, gradients included."""
    module = DynamicWeightGenerator(shape[1], dims=len(shape) - 2, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]
    probe = torch.randn(shape, dtype=torch.float64)
    results = []
    for run in (module.forward, module.reference):
        y = run(x)
        results.append([y, *torch.autograd.grad((y * probe).sum(), inputs)])
    pairs = zip(*results, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds (for CI)")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    cases, rounds = (QUICK, 3) if quick else (CASES, 9)
    print(f"forward + backward, K=4, kernel 3, {torch.get_num_threads()} threads; milliseconds")
    print(f"{'input':<18} {'type':<5} {'fast':>9} {'loop':>9} {'unfold+bmm':>11} {'loop/fast':>10}")
    ratios = []
    for shape in cases:
        for bf16 in (False, True):
            ms = measure(shape, bf16, rounds)
            ratios.append(ms["loop"] / ms["fast"])
            print(
                f"{shape!s:<18} {'bf16' if bf16 else 'fp32':<5} {ms['fast']:>9.2f} "
                f"{ms['loop']:>9.2f} {ms['unfold + bmm']:>11.2f} {ratios[-1]:>10.2f}",
                flush=True,
            )
    worst = max(difference(shape) for shape in QUICK)
    result = {
        "fast_vs_loop": round(math.exp(statistics.fmean(map(math.log, ratios))), 2),
        "fast_vs_loop_min": round(min(ratios), 2),
        "rows": len(ratios),
        "difference_fp64": worst,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
