"""Optimizers that are not the same on every rank: refused before their first step, on all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lezero.core import groups
from lezero.core.errors import ConfigError, DistributedError
from lezero.optim import AdamW
from lezero.parallel.zero import Zero, shard_
from tests.parallel.zero.models import batches, loss_of, make
from tests.ranks import RankPool


def computed(stage: int) -> nn.Module:
    model = shard_(make(), Zero(stage=stage))
    loss_of(model, next(batches(1))).backward()
    return model


def other_options(stage: int) -> None:
    model, rank = computed(stage), groups.rank()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(DistributedError, match=r"AdamW.step: 'lr of group 0' is 0.1 on rank 0 but"):
        AdamW(model.parameters(), lr=0.1 / (1 + rank)).step()
    betas = (0.9, 0.999 if rank == 0 else 0.99)
    with pytest.raises(DistributedError, match=r"'betas of group 0' is \[0.9, 0.999\] on rank 0"):
        torch.optim.AdamW(model.parameters(), betas=betas).step()
    kind = torch.optim.SGD if rank == 0 else torch.optim.Adagrad
    with pytest.raises(DistributedError, match=r"'optimizer' is 'SGD' on rank 0 but 'Adagrad'"):
        kind(model.parameters(), lr=0.1).step()
    first, *rest = model.parameters()
    with pytest.raises(DistributedError, match=r"'parameters of group 0' is 22 on rank 0 but 21"):
        torch.optim.SGD([first, *rest][rank:], lr=0.1).step()
    order = 1 if rank == 0 else -1
    with pytest.raises(DistributedError, match=r"'digest of the parameters of group 0, in order'"):
        torch.optim.SGD([first, *rest][::order], lr=0.1).step()
    several = [{"params": rest}, {"params": [first], "lr": 0.5}]
    with pytest.raises(DistributedError, match=r"group 1' is 1 on rank 0 but 'nothing' on rank 1"):
        torch.optim.SGD(several[: 2 - rank], lr=0.1).step()
    for then, now in zip(before, model.parameters(), strict=True):
        assert torch.equal(then, now.detach())
    torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)).step()
    own = {"scales": torch.ones(3), "table": np.ones(2), "none": torch.empty(0), "f": lambda: rank}
    group = {"params": list(model.parameters()), "target": (0, float("nan")), **own}
    torch.optim.SGD([group], lr=0.1).step()


def beside(stage: int) -> None:
    rank = groups.rank()
    model, head, frozen = computed(stage), nn.Linear(4, 2), nn.Linear(2, 2).requires_grad_(False)
    held = [*model.parameters(), *frozen.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(held, lr=0.1)
    optimizer.step()  # none of the head has a gradient yet
    head.weight.grad = torch.zeros(2, 4)  # behind a layer that begins with zeros
    optimizer.step()
    differ: list[torch.Tensor | None] = [
        torch.full((2, 4), float(rank)),
        torch.eye(4)[2 * rank : 2 * rank + 2],  # of one norm
        torch.ones(2, 4) if rank == 0 else None,
        torch.eye(4)[rank : rank + 2].to_sparse(),
    ]
    for gradient in differ:
        head.weight.grad = gradient
        with pytest.raises(ConfigError, match=r"SGD.step: 1 of its .* no sharded .* \(2, 4\)"):
            optimizer.step()
    head.weight.grad = torch.full((2, 4), float("nan"))  # as of a reduction that every rank has
    optimizer.step()
    head.bias.grad = torch.ones(2) * rank
    with pytest.raises(ConfigError, match=r"shape \(2,\)"):
        optimizer.step()
    frozen.requires_grad_()
    head.bias.grad, frozen.bias.grad = None, torch.ones(2) * rank
    with pytest.raises(ConfigError, match=r"SGD.step: 1 of its .* shape \(2,\)"):
        optimizer.step()
    frozen.weight.requires_grad_(rank == 0)
    with pytest.raises(DistributedError, match=r"'trained parameters of group 0' is 26 on"):
        torch.optim.SGD(held, lr=0.1).step()
    torch.optim.SGD(head.parameters(), lr=0.1).step()  # of no sharded model: none of our business


def beside_by_closure(stage: int) -> None:
    model, head = computed(stage), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        head.grad = torch.tensor([1.0 - 2 * groups.rank()])
        return 0.0

    optimizer.step(closure)
    optimizer.add_param_group({"params": [head], "lr": 0.2})
    with pytest.raises(ConfigError, match=r"shape \(1,\)"):
        optimizer.step(closure)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("case", [other_options, beside, beside_by_closure])
def test_optimizers_that_differ_between_ranks(ranks: RankPool, case, stage: int) -> None:
    ranks(2, case, stage)
