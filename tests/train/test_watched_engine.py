"""An Engine whose ranks part: what the user of the other ranks reads."""

from __future__ import annotations

import re
import time

import torch
import torch._dynamo  # the first optimizer step loads it; here it is loaded once for all ranks
from torch import nn

from lezero.comm.watch import current
from lezero.core import groups
from lezero.optim import AdamW
from lezero.train.engine import Engine


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.first(x)).square().mean()


def run(scene):
    torch.manual_seed(0)
    model = Model()
    engine = Engine(model, AdamW(model, lr=1e-2), precision="fp32", compile="off")
    batch = {"x": torch.ones(2, 4)}
    for _ in range(3):
        engine.train_step(batch)
    bad, start = groups.rank() == 1, time.monotonic()
    try:
        globals()[scene](engine, batch, bad)
    except RuntimeError as error:
        told = f"{type(error).__name__}: {error}"
        time.sleep(0.3)
        return told, time.monotonic() - start
    return "", current()._entered


def one_batch_less(engine, batch, bad):
    if not bad:
        engine.train_step(batch)
    engine.evaluate([batch])


def bad_batch(engine, batch, bad):
    engine.train_step({"x": torch.ones(2, 5)} if bad else batch)


def healthy(engine, batch, bad):
    for _ in range(20):
        engine.train_step(batch)
        if bad:
            engine.evaluate([batch] * 10)
        else:
            engine.evaluate([])


def test_a_rank_with_one_batch_less_is_named(ranks):
    (first, seconds), (second, _) = ranks(2, run, "one_batch_less", timeout_s=30)
    pattern = (
        r"DistributedError: the ranks parted at collective \d+: rank 1 entered all_reduce of "
        r"'evaluation loss' \(float64 \[4\]\) at tests/train/test_watched_engine\.py:\d+, where "
        r"rank 0 entered all_reduce of 'counts' \(int64 \[\d+\]\) at tests/train/test_watched"
    )
    assert re.match(pattern, first), first
    assert first == second
    assert seconds < 5


def test_an_exception_on_one_rank_is_told_to_the_others(ranks):
    (first, seconds), (second, _) = ranks(2, run, "bad_batch", timeout_s=30)
    assert second.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert first.startswith(f"DistributedError: rank 1 failed: {second} (at tests/train/"), first
    assert "rank 0 waits in collective" in first
    assert seconds < 5


def test_gradients_and_figures_are_labelled_and_nothing_is_said(ranks):
    for told, entered in ranks(2, run, "healthy", timeout_s=60):
        assert not told
        # 3 steps, then 20: counts, one bucket of gradients, loss; and 20 evaluations
        assert entered >= 23 * 3 + 20
