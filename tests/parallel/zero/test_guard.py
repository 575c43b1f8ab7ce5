"""Steps of optimizers around sharded models: compiled ones, and those that would do nothing."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as hooks

from lezero.core.errors import OrderError
from lezero.parallel.zero import Zero, guard, shard_
from tests.parallel.zero.models import batches, loss_of, make
from tests.ranks import RankPool


def test_a_compiled_step_runs_the_guard_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spy(*_: object) -> None:
        seen.append(torch.compiler.is_compiling())

    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(hooks, name, OrderedDict())
    for name in ("_before_step", "_after_step"):
        monkeypatch.setattr(guard, name, spy)
    monkeypatch.setattr(guard, "_registered", False)
    guard.register()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    assert seen == [False, False]


def in_vain(stage: int) -> None:
    model = shard_(make(), Zero(stage=stage))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # nothing was computed, nothing is expected
    (tokens,) = batches(1)
    loss_of(model, tokens).backward(inputs=list(model.parameters()))
    with pytest.raises(OrderError, match=r"SGD.step: none of its 22 .* and without inputs="):
        optimizer.step()

    def closure() -> float:
        loss = loss_of(model, tokens)
        loss.backward()
        return float(loss)

    optimizer.step(closure)
    loss_of(model, tokens)  # of no further use
    optimizer.step()
    with pytest.raises(OrderError, match=r"sums its gradients .* by itself; train it without"):
        DistributedDataParallel(model)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_that_would_change_nothing_and_ddp_around_are_refused(
    ranks: RankPool, stage: int
) -> None:
    ranks(2, in_vain, stage)
