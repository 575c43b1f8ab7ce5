"""Attributes that a model or its user has set on parameters: there at every stage."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.parallel.zero import Zero, fsdp, materialize_, shard_
from tests.parallel.zero.models import Vectors, batches, loss_of, make, whole
from tests.parallel.zero.test_meta import Drawn, on_meta
from tests.ranks import RankPool


def marked(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]


def mark(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.up.bias._no_weight_decay = True
        block.down.weight._optim = {"lr": 0.1}
    model.embed.weight._no_weight_decay = True
    return model


def trained(stage: int, compute: str = "auto") -> tuple[object, ...]:
    """Groups by the marks; what forward sees of them; the last parameters."""
    model = shard_(mark(make(Vectors)), Zero(stage=stage, compute=compute))
    kept = {id(p) for p in marked(model)}
    rest = [p for p in model.parameters() if id(p) not in kept]
    groups = [{"params": marked(model), "weight_decay": 0.0}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.5)
    seen: list[object] = []
    for block in model.blocks:
        block.down.register_forward_pre_hook(
            lambda part, _: seen.append(getattr(part.weight, "_optim", None))
        )
    for tokens in batches(2):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(block.down.weight._optim == {"lr": 0.1} for block in model.blocks)
    return len(kept), seen, {name: value.tolist() for name, value in whole(model).items()}


def all_stages(compute: str) -> list[tuple[object, ...]]:
    return [trained(stage, compute) for stage in range(4)]


@pytest.mark.parametrize(("world", "compute"), [(1, "bf16"), (2, "auto")])
def test_marks_are_there_at_every_stage(ranks: RankPool, world: int, compute: str) -> None:
    for stages in ranks(world, all_stages, compute):
        assert stages[0][:2] == (4, [{"lr": 0.1}] * 6)
        assert stages[1:] == stages[:1] * 3


def under_fsdp() -> None:
    fsdp.fits = lambda *_: True
    model = shard_(mark(make(Vectors)), Zero(stage=3))
    assert len(marked(model)) == 4
    assert model.blocks[0].down.weight._optim == {"lr": 0.1}


def test_marks_are_there_under_fsdp2(ranks: RankPool) -> None:
    ranks(2, under_fsdp)


def from_meta() -> None:
    model = shard_(mark(on_meta(Drawn)), Zero(stage=3))
    model.norm.weight._no_weight_decay = True
    names = {name for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert len(names) == 5
    materialize_(model)
    for name, parameter in model.named_parameters():
        assert getattr(parameter, "_no_weight_decay", False) == (name in names)
        assert not parameter.full_tensor().is_meta  # LeZero's attribute is of each its own


def test_marks_of_models_from_meta_are_kept(ranks: RankPool) -> None:
    ranks(2, from_meta)
