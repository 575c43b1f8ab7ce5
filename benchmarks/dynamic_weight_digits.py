"""Does DynamicWeightGenerator learn what a static layer of equal FLOPs learns worse?

    python benchmarks/dynamic_weight_digits.py [--quick]

Data: scikit-learn's 1,797 real digits of 8x8 pixels; 5-fold stratified cross-validation, repeated
with five seeds (split, initial weights and batches follow the seed; all ways see the same).
Network: 3x3 convolution to 8 channels, batch norm, ReLU, the layer under test, batch norm, ReLU,
mean over positions, linear. The layer under test is one of

- `dynamic`: DynamicWeightGenerator as shipped (8 channels, K=4);
- `annealed`: the same, its temperature going from 30 to 1 over the first third of the training,
  as Dynamic Convolution advises;
- `static, equal FLOPs`: a 3x3 convolution, widened until the network's counted FLOPs reach those
  of `dynamic`;
- `static, equal parameters`: the same, widened until its parameters do.

Each way gets its own learning rate, chosen of three by the mean log-loss of three trainings on a
validation part of the first training split. Differences are paired by (seed, fold); since folds
share training data, the standard error is the corrected one of Nadeau and Bengio (2003, "Inference
for the generalization error", Machine Learning 52, section 3): variance * (1/n + test/train).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.stats import t as student  # type: ignore[import-untyped]
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lezero.nn import DynamicWeightGenerator

CHANNELS, BATCH = 8, 64
RATES = (3e-3, 1e-2, 3e-2)
EQUAL_FLOPS = "static, equal FLOPs"


@dataclass(frozen=True)
class Way:
    """One row of the table: how its layer is built and whether its temperature is annealed."""

    layer: Callable[[], nn.Module]
    width: int
    annealed: bool = False

    def network(self) -> nn.Sequential:
        first, last = nn.Conv2d(1, CHANNELS, 3, padding=1), nn.Linear(self.width, 10)
        before = nn.Sequential(first, nn.BatchNorm2d(CHANNELS), nn.ReLU())
        after = nn.Sequential(nn.BatchNorm2d(self.width), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        return nn.Sequential(before, self.layer(), after, nn.Flatten(), last)

    def flops(self) -> int:
        """Counted FLOPs of one sample, forward."""
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.network()(torch.zeros(BATCH, 1, 8, 8))
        return counter.get_total_flops() // BATCH

    def parameters(self) -> int:
        return sum(p.numel() for p in self.network().parameters())


def static(width: int) -> Way:
    return Way(lambda: nn.Conv2d(CHANNELS, width, 3, padding=1), width)


def ways() -> dict[str, Way]:
    dynamic = Way(lambda: DynamicWeightGenerator(CHANNELS), CHANNELS)
    grown = [static(width) for width in range(CHANNELS, 8 * CHANNELS)]
    return {
        EQUAL_FLOPS: next(way for way in grown if way.flops() >= dynamic.flops()),
        "static, equal parameters": next(
            way for way in grown if way.parameters() >= dynamic.parameters()
        ),
        "dynamic": dynamic,
        "annealed": Way(dynamic.layer, CHANNELS, annealed=True),
    }


def train(way: Way, x: Tensor, y: Tensor, rate: float, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = way.network()
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-4)
    steps = epochs * math.ceil(len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = 0
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=order).split(BATCH):
            layer = model[1]
            if way.annealed and isinstance(layer, DynamicWeightGenerator):
                layer.temperature.fill_(max(1.0, 30 - 29 * 3 * step / steps))
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
    return model.eval()


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy in percent and mean log-loss."""
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y).item()
    return 100 * (logits.argmax(1) == y).double().mean().item(), loss


def choose_rate(way: Way, x: Tensor, y: Tensor, epochs: int) -> float:
    rows, held = train_test_split(range(len(x)), test_size=0.2, random_state=0, stratify=y)
    losses = {
        rate: statistics.fmean(
            score(train(way, x[rows], y[rows], rate, epochs, seed), x[held], y[held])[1]
            for seed in (1000, 1001, 1002)
        )
        for rate in RATES
    }
    return min(losses, key=losses.__getitem__)


def paired(differences: list[float], folds: int) -> tuple[float, float, float]:
    """Mean difference, corrected standard error, two-sided p."""
    n, mean = len(differences), statistics.fmean(differences)
    error = math.sqrt(statistics.variance(differences) * (1 / n + 1 / (folds - 1)))
    p = 2 * float(student.sf(abs(mean) / error, n - 1)) if error > 0 else 1.0
    return mean, error, p


def run(seeds: int, folds: int, epochs: int) -> dict[str, float | int]:
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    table = ways()
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in table}
    rates: dict[str, float] = {}
    for seed in range(seeds):
        splits = StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, y)
        for fold, (rows, held) in enumerate(splits):
            for name, way in table.items():
                if name not in rates:
                    rates[name] = choose_rate(way, x[rows], y[rows], epochs)
                model = train(way, x[rows], y[rows], rates[name], epochs, 100 * seed + fold)
                results[name].append(score(model, x[held], y[held]))
    base = results[EQUAL_FLOPS]
    print(
        f"{'layer':<26} {'FLOPs':>8} {'params':>7} {'rate':>6} {'accuracy %':>11} {'log-loss':>9}"
        f" {'difference':>11} {'SE':>6} {'p':>6}"
    )
    summary: dict[str, float | int] = {"runs": seeds * folds}
    for name, way in table.items():
        accuracy = statistics.fmean(a for a, _ in results[name])
        loss = statistics.fmean(b for _, b in results[name])
        row = (
            f"{name:<26} {way.flops():>8} {way.parameters():>7} {rates[name]:>6} {accuracy:>11.2f}"
        )
        row += f" {loss:>9.4f}"
        if name != EQUAL_FLOPS:
            pairs = zip(results[name], base, strict=True)
            mean, error, p = paired([a[0] - b[0] for a, b in pairs], folds)
            row += f" {mean:>+11.2f} {error:>6.2f} {p:>6.3f}"
            key = name.replace("static, ", "").replace(" ", "_")
            summary |= {
                f"{key}_gain_points": round(mean, 3),
                f"{key}_standard_error": round(error, 3),
            }
            summary |= {f"{key}_p": round(p, 4)}
        print(row)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description="dynamic against static layers on real digits")
    parser.add_argument("--quick", action="store_true", help="one seed, few epochs (for CI)")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    start = time.perf_counter()
    summary = run(1, 2, 2) if quick else run(5, 5, 30)
    print("difference: accuracy points above 'static, equal FLOPs', paired by seed and fold")
    print(json.dumps({**summary, "seconds": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    main()
