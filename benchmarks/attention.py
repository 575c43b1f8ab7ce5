"""Attention for training on the CPU in bf16: LeZero's kernel against torch's, in one run.

    python benchmarks/attention.py [--quick]

Forward and backward passes on q, k, v as a fused projection gives them (transposed views), the two
kernels interleaved, medians compared. Errors are norms of differences from the formula in fp64. The
last line is one JSON object: `attention_vs_torch` is ours / torch's time, both passes, at the
shape of the 26M model, `error_vs_torch` the largest ratio of errors over the rows (output and three
gradients), `mode_us` what `FastAttention` adds to a call of another torch function.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _table import arguments
from torch import Tensor
from torch.nn import functional as F

from lezero.ops.attention import FastAttention, attention, available, kernel_name, reference


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    G: int
    T: int
    E: int
    causal: bool = True

    def __str__(self) -> str:
        heads = f"{self.H}" if self.H == self.G else f"{self.H}/{self.G}"
        kind = "causal" if self.causal else "full"
        return f"B{self.B} H{heads} T{self.T} E{self.E} {kind}"


GPT_26M = Case(8, 8, 8, 256, 64)
CASES = [
    GPT_26M,
    Case(8, 8, 8, 256, 64, causal=False),
    Case(8, 9, 3, 256, 64),
    Case(2, 8, 8, 1024, 64),
    Case(2, 8, 2, 1024, 128),
    Case(1, 4, 4, 2048, 64),
    Case(16, 12, 12, 100, 32),
    Case(64, 8, 8, 32, 64),
]
QUICK = [GPT_26M, Case(2, 4, 2, 100, 32, causal=False)]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(case: Case) -> list[Tensor]:
    """q, k, v as views of one projection's output, and the gradient of the output."""
    heads = [case.H, case.G, case.G]
    fused = torch.randn(case.B, case.T, sum(heads), case.E).to(torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in fused.split(heads, 2))
    return [q, k, v, torch.randn(case.B, case.T, case.H, case.E).to(torch.bfloat16).transpose(1, 2)]


def ways(case: Case) -> dict[str, Attend]:
    gqa = case.H != case.G

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=gqa)

    return {"lezero": lambda q, k, v: attention(q, k, v, causal=case.causal), "torch": torchs}


def one_pass(attend: Attend, tensors: list[Tensor]) -> tuple[float, float, list[Tensor]]:
    """Seconds forward, seconds backward, and the output with the gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    began = time.perf_counter()
    out = attend(*leaves)
    middle = time.perf_counter()
    grads = torch.autograd.grad(out, leaves, tensors[3].to(out.dtype))
    return middle - began, time.perf_counter() - middle, [out.detach(), *grads]


def measure(case: Case, rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds forward and backward of each way."""
    tensors, sides = inputs(case), ways(case)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        for name in list(sides) if number % 2 else reversed(sides):
            forward, backward, _ = one_pass(sides[name], tensors)
            if number >= 2:
                taken[name].append((1e3 * forward, 1e3 * backward))
    return {
        name: (statistics.median(f for f, _ in rows), statistics.median(b for _, b in rows))
        for name, rows in taken.items()
    }


def error_ratio(case: Case) -> float:
    """The largest of (our error / torch's) over the output and the gradients, one sample."""
    tensors = [x[:1] for x in inputs(case)]
    exact = lambda q, k, v: reference.attention(q, k, v, case.causal, case.E**-0.5)  # noqa: E731
    truth = one_pass(exact, [x.double() for x in tensors])[2]
    errors = {
        name: [
            (x.double() - y).norm().item()
            for x, y in zip(one_pass(attend, tensors)[2], truth, strict=True)
        ]
        for name, attend in ways(case).items()
    }
    return max(a / b for a, b in zip(errors["lezero"], errors["torch"], strict=True))


def mode_cost(calls: int = 5000) -> float:
    """Microseconds that the mode adds to one call of another torch function."""
    x = torch.ones(4)

    def loop() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            torch.neg(x)
        return (time.perf_counter() - began) / calls * 1e6

    plain, under = [], []
    for _ in range(7):
        plain.append(loop())
        with FastAttention():
            under.append(loop())
    return statistics.median(under) - statistics.median(plain)


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if not available():
        print(f"no kernel runs here (this processor's: {kernel_name() or 'none'})")
        print(json.dumps({"attention_vs_torch": None}))
        return
    rounds = options.rounds or (5 if options.quick else 21)
    print(f"bf16, kernel {kernel_name()}, {options.threads} threads; milliseconds")
    head = f"{'shape':<28} {'fwd':>7} {'bwd':>7} {'torch fwd':>10} {'torch bwd':>10}"
    print(f"{head} {'ours/torch':>11} {'error/torch':>12}")
    ratios, errors = {}, []
    for case in QUICK if options.quick else CASES:
        ms = measure(case, rounds)
        ratios[case] = sum(ms["lezero"]) / sum(ms["torch"])
        errors.append(error_ratio(case))
        figures = f"{ms['lezero'][0]:>7.2f} {ms['lezero'][1]:>7.2f} {ms['torch'][0]:>10.2f}"
        figures += f" {ms['torch'][1]:>10.2f} {ratios[case]:>11.3f} {errors[-1]:>12.2f}"
        print(f"{case!s:<28} {figures}", flush=True)
    result = {
        "attention_vs_torch": ratios[GPT_26M],
        "worst_vs_torch": max(ratios.values()),
        "error_vs_torch": max(errors),
        "mode_us": mode_cost(),
        "rows": len(ratios),
    }
    print(json.dumps({key: float(f"{value:.4g}") for key, value in result.items()}))


if __name__ == "__main__":
    main()
