"""A step of LeZero's AdamW kernels is not slower than torch's fused fp32 one, and trains as well.

Every side updates 25M parameters in matrices of 1024 columns. `bytes` is what a parameter takes
with weight, gradient and state; `GB/s` is what a step has to move, over the time; `of copy` that
over what a copy of 256 MiB moves on this machine, read and written. `loss` is the mean over the
last tenth of a small GPT's training on the documents of Python, and `gap %` how far it is above
torch's.

With `--device cuda` all of it is on one GPU, of 200M parameters.

Last line: `*_vs_torch` are times a step divided by torch's, `*_gap_pct` the losses.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from _table import arguments, best_of, columns, compare, emit, finish, side
from torch import nn

from lezero.models import Transformer, TransformerConfig
from lezero.optim import AdamW, AdamW8bit

Make = Callable[[Iterable[Any] | nn.Module, float], torch.optim.Optimizer]
COLUMNS = 1024


def torchs(params: Any, lr: float) -> torch.optim.Optimizer:
    listed = params.parameters() if isinstance(params, nn.Module) else params
    return torch.optim.AdamW(listed, lr, weight_decay=0.0, fused=True)


SIDES: dict[str, tuple[Make, torch.dtype, float]] = {
    # How it is made, the weights' type, the bytes a parameter that a step reads and writes.
    "torch fused fp32": (torchs, torch.float32, 28),
    "fp32 masters": (
        lambda p, lr: AdamW(p, lr, weight_decay=0.0, masters="fp32"),
        torch.bfloat16,
        30,
    ),
    "remainder": (
        lambda p, lr: AdamW(p, lr, weight_decay=0.0, masters="remainder"),
        torch.bfloat16,
        26,
    ),
    "8 bit fp32": (lambda p, lr: AdamW8bit(p, lr, weight_decay=0.0), torch.float32, 16 + 1 / 16),
    "8 bit remainder": (
        lambda p, lr: AdamW8bit(p, lr, weight_decay=0.0, masters="remainder"),
        torch.bfloat16,
        14 + 1 / 16,
    ),
}
KEYS = {"8 bit remainder": "adamw8bit", "8 bit fp32": "adamw8bit_fp32", "remainder": "remainder"}


def settled(work: Callable[[], object], device: str) -> Callable[[], None]:
    """`work`, and what an accelerator has queued of it done."""

    def run() -> None:
        work()
        if device != "cpu":
            torch.accelerator.synchronize()

    return run


def step_time(
    make: Make, dtype: torch.dtype, elements: int, repeats: int, device: str
) -> dict[str, float]:
    rows, kinds = elements // COLUMNS // 8, {"dtype": dtype, "device": device}
    weights = [nn.Parameter(torch.randn(rows, COLUMNS, **kinds)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = make(weights, 1e-4)
    seconds = statistics.median(best_of(settled(optimizer.step, device), repeats))
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    held = sum(x.nbytes for x in [*weights, *(w.grad for w in weights), *state] if x is not None)
    count = sum(weight.numel() for weight in weights)
    return {"s": seconds, "bytes": held / count, "count": count}


def trained(make: Make, dtype: torch.dtype, steps: int, device: str) -> float:
    """Mean loss of the last tenth of a training of a 0.5M GPT."""
    torch.manual_seed(0)
    text = "".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    config = TransformerConfig(vocab=256, layers=2, dim=128, heads=4, context=64)
    model = Transformer(config, seed=0).to(device, dtype)
    optimizer, losses = make(model, 2e-3), []
    for step in range(steps):
        pick = torch.Generator().manual_seed(step)
        starts = torch.randint(len(data) - 65, (16,), generator=pick)
        batch = torch.stack([data[start : start + 65] for start in starts.tolist()])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.fmean(losses[-max(1, steps // 10) :])


def copy_rate(elements: int, device: str) -> float:
    """Bytes a second that a copy of as many fp32 reads and writes."""
    source = torch.ones(elements, device=device)
    to = torch.empty_like(source)
    return 2 * source.nbytes / min(best_of(settled(lambda: to.copy_(source), device), 5))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = arguments(__doc__, parser)
    place = options.device
    elements, repeats, steps = (2_000_000, 3, 2) if options.quick else (25_000_000, 9, 300)
    if place != "cpu" and not options.quick:
        elements = 200_000_000
    if options.side:
        torch.set_num_threads(options.threads)
        make, dtype, moved = SIDES[options.side]
        found = step_time(make, dtype, elements, repeats, place)
        rate = moved * found["count"] / found["s"]
        share = rate / copy_rate(64 << 20 if not options.quick else 4 << 20, place)
        loss = trained(make, dtype, steps, place)
        emit(**found, rate=rate / 1e9, share=share, loss=loss)
        return
    extra = ["--device", place, *(["--quick"] if options.quick else [])]
    names = ["torch fused fp32", "8 bit remainder"] if options.quick else list(SIDES)
    sides = [side(__file__, name, *extra) for name in names]
    result = compare(
        sides, rounds=options.rounds or (1 if options.quick else 3), threads=options.threads
    )
    base = "torch fused fp32"
    rows = [["side", "ms a step", "× torch", "GB/s", "of copy", "bytes", "loss", "gap %"]]
    figures: dict[str, Any] = {}
    for name in names:
        if name in result.failed:
            rows.append([name, result.failed[name]])
            continue
        ratio = result.ratio("s", name, base)
        gap = 100 * (result.ratio("loss", name, base) - 1)
        get = lambda key, name=name: result.median(name, key)  # noqa: E731
        rows.append(
            [
                *(name, f"{1e3 * get('s'):.1f}", f"{ratio:.3f}", f"{get('rate'):.1f}"),
                *(f"{get('share'):.2f}", f"{get('bytes'):.2f}", f"{get('loss'):.4f}", f"{gap:.2f}"),
            ]
        )
        if name in KEYS:
            figures |= {f"{KEYS[name]}_vs_torch": ratio, f"{KEYS[name]}_gap_pct": gap}
            figures[f"{KEYS[name]}_bytes"] = get("bytes")
    finish(columns(rows), figures)


if __name__ == "__main__":
    main()
