"""What a model does with gathered parameters beyond computing: hands them on, writes them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.errors import OrderError
from lezero.parallel.zero import Zero, full_parameters, shard_
from tests.parallel.zero.models import batches, loss_of, make


@dataclass
class Result:
    y: torch.Tensor
    weight: torch.Tensor


class Block(nn.Module):
    """Hands its weight on: returned, kept in an attribute, or inside of a dataclass."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.kept = way, None
        self.w, self.line = nn.Parameter(torch.randn(8, 8) / 3), nn.Linear(8, 8)

    def forward(self, x):
        y = torch.tanh(self.line(x) @ self.w)
        if self.way == "attribute":
            self.kept = self.w[:4]
            return y, None
        if self.way == "dataclass":
            return Result(y, self.w)
        part = {"whole": self.w, "view": self.line.weight[:4], "detached": self.w.detach()}
        return y, {"weight": part[self.way]}


class Penalized(nn.Module):
    """Its loss counts the weights of all blocks at its end."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(way) for _ in range(5))

    def forward(self, x):
        weights = []
        for block in self.blocks:
            x, found = block(x)
            weights.append(block.kept if found is None else found["weight"])
        return x.square().mean() + sum(w.square().sum() for w in weights) * 0.01


def penalties(way, stage):
    torch.manual_seed(0)
    model = Penalized(way).double()
    if stage is not None:
        shard_(model, Zero(stage=stage))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model(x).item())
    return losses


@pytest.mark.parametrize("way", ["whole", "view", "detached", "attribute"])
def test_weights_that_blocks_hand_on_stay_what_they_were(ranks, way):
    plain = penalties(way, None)
    for stage in (1, 3):
        for found in ranks(2, penalties, way, stage):
            assert found == pytest.approx(plain, abs=1e-10)


def handed_on_in_a_dataclass():
    model = shard_(nn.Sequential(*(Block("dataclass") for _ in range(3))), Zero(stage=3))
    with pytest.raises(OrderError, match=r"block '0' returns a weight.*inside a Result"):
        model(torch.randn(2, 8))


def test_a_weight_in_what_cannot_be_made_anew_is_refused(ranks):
    ranks(2, handed_on_in_a_dataclass)


class Written(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.line = what, nn.Linear(6, 6)
        self.code = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            if self.what == "trained":
                self.line.weight.clamp_(min=0)
            if self.what == "frozen":
                self.code.add_(0.5)
        return self.line(x) * self.code


def writes(what, stage):
    torch.manual_seed(0)
    model = nn.Sequential(Written(what), Written(what)).double()
    wanted = [p.detach().clone() for p in model.parameters()]
    shard_(model, Zero(stage=stage))
    x = torch.ones(2, 6, dtype=torch.float64)
    if stage:
        with pytest.raises(OrderError, match=r"parameter '0.* was written in forward.*between st"):
            model(x)
        return
    model(x)
    for (name, found), value in zip(full_parameters(model), wanted, strict=True):
        changed = "weight" in name if what == "trained" else "code" in name
        assert torch.equal(found, value) is not changed


@pytest.mark.parametrize("what", ["trained", "frozen"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_forward_writes_is_kept_or_refused(ranks, what, stage):
    if (what, stage) != ("frozen", 1):  # what is frozen is not split at stages 1 and 2
        ranks(2, writes, what, stage)


def assigned():
    torch.manual_seed(0)
    plain, model = (nn.Linear(4, 2), nn.Linear(4, 2))
    model.load_state_dict(plain.state_dict())
    shard_(model, Zero(stage=0))
    x, losses = torch.ones(3, 4), []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).square().mean().backward()
        optimizer.step()
        flat = nn.utils.parameters_to_vector(each.parameters())
        nn.utils.vector_to_parameters(flat * 0.5, each.parameters())
        losses.append(each(x).square().mean().item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_values_that_are_assigned_at_stage_0_count(ranks):
    ranks(2, assigned)


def changed_by_hand(stage: int, wire: dict[str, str] | None) -> tuple[list[float], float]:
    """Two optimizers, each for a part of every block, and a bound on the weights after the step."""
    torch.manual_seed(0)
    model = make().double()
    if wire is not None:
        shard_(model, Zero(stage=stage), wire=Wire(**wire))
    parts = [p for n, p in model.named_parameters() if "up" in n or "embed" in n]
    rest = [p for p in model.parameters() if all(p is not part for part in parts)]
    optimizers = [torch.optim.SGD(some, 0.5) for some in (parts, rest)]
    losses = []
    for tokens in batches(12):
        mine = tokens if wire is None else tokens.chunk(groups.world_size())[groups.rank()]
        loss = loss_of(model, mine)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.25, 0.25)
        losses.append(float(loss))
    return losses, max(float(p.abs().max()) for _, p in full_parameters(model))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_writes_between_steps_are_never_lost(ranks, stage):
    """What a step changed is gathered while the program goes on: other writes must not be undone
    by what is under way."""
    alone, bound = changed_by_hand(0, None)
    assert bound == 0.25
    for _ in range(2):
        found = ranks(2, changed_by_hand, stage, {"topology": "flat"})
        means = [(a + b) / 2 for a, b in zip(found[0][0], found[1][0], strict=True)]
        assert means == pytest.approx(alone, abs=1e-10)
        assert found[0][1] == found[1][1] == 0.25
