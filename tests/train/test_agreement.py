"""Options that one rank changes in mid-run are told of by every rank."""

from __future__ import annotations

import math

import pytest
import torch

from lezero.core import groups
from lezero.core.errors import DistributedError
from lezero.train import agreement
from tests.train.test_distributed import global_batches, make, mine


def changed_on_one_rank(what: str) -> list[str]:
    engine, told = make(clip=1.0), list[str]()
    batches = iter(global_batches(4))
    for _ in range(2):
        engine.train_step(mine(next(batches)))
    before = [p.detach().clone() for p in engine.model.parameters()]
    if groups.rank() == 1:
        if what == "clip":
            engine.clip = 0.01
        else:
            engine.optimizer.param_groups[0][what] = 1e-4
    try:
        engine.train_step(mine(next(batches)))
    except DistributedError as error:
        told.append(str(error))
    same = all((p == q).all() for p, q in zip(engine.model.parameters(), before, strict=True))
    return [*told, "nothing moved" if same else "moved"]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("lr", "'lr of group 0 of the optimizer' is 0.01 on rank 0 but 0.0001 on rank 1"),
        ("weight_decay", "'weight_decay of group 0 of the optimizer' is"),
        ("clip", "'clip' is 1.0 on rank 0 but 0.01 on rank 1"),
    ],
)
def test_options_of_one_rank_are_told_on_all(ranks, what: str, named: str) -> None:
    for told, after in ranks(2, changed_on_one_rank, what):
        assert named in told
        assert after == "nothing moved"


def changed_on_all() -> float:
    engine = make(clip=1.0)
    for step, batch in enumerate(global_batches(4)):
        engine.optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        engine.clip = 1.0 + step
        engine.train_step(mine(batch))
    return float(sum(p.detach().sum() for p in engine.model.parameters()))


def test_options_may_change_on_all_alike(ranks) -> None:
    one, two = ranks(2, changed_on_all)
    assert one == two


def alike_but_for_the_last_bit() -> bool:
    engine = make(clip=1.0)
    group = engine.optimizer.param_groups[0]
    group.update(betas=[0.9, 0.95], odd=math.nan, held=(torch.ones(1), 2))
    for batch in global_batches(3):
        group["lr"] = math.nextafter(0.01, groups.rank())  # as cosines of two processors
        if groups.rank():
            group["held"] = group.pop("held")  # in another order
        engine.train_step(mine(batch))
    if groups.rank():
        group["betas"] = [0.9, 0.96]
    with pytest.raises(DistributedError, match=r"'betas of group 0 .* is \[0.9, 0.95\] on rank 0"):
        engine.train_step(mine(batch))
    return True


def test_the_last_bit_of_a_rate_is_no_difference(ranks) -> None:
    assert ranks(2, alike_but_for_the_last_bit) == [True, True]


def test_numbers_near_a_step_of_rounding_are_alike() -> None:
    one, two = 1.0000005, math.nextafter(1.0000005, 2)
    agreement._compare([{"lr": one, "nan": math.nan}, {"lr": two, "nan": math.nan}])
    with pytest.raises(DistributedError, match="'lr' is 1 on rank 0 but 'nothing' on rank 1"):
        agreement._compare([{"lr": 1}, {}])
