"""What a sharded model does for itself goes past modes, as the engine's attention and a user's."""

from __future__ import annotations

import pytest

from lezero.ops.attention.mode import backward
from lezero.parallel.zero import Zero, shard_
from tests.core.test_function_modes import Counting
from tests.parallel.zero.models import batches, loss_of, make
from tests.ranks import RankPool


def calls_in_a_backward(stage: int) -> tuple[int, int]:
    seen = []
    for split in (False, True):
        model = shard_(make(), Zero(stage=stage)) if split else make()
        for tokens in batches(2):  # what comes first, and the order of later ones
            loss = loss_of(model, tokens)
            with Counting() as mode:
                backward(loss)
        seen.append(mode.calls)
    return seen[0], seen[1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_no_mode_is_asked_about_what_hooks_do(ranks: RankPool, stage: int) -> None:
    for plain, split in ranks(2, calls_in_a_backward, stage):
        assert split == plain
