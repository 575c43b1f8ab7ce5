"""What a run's state takes at least, before anything is traced."""

from __future__ import annotations

import pytest

from lezero.parallel.zero import Zero
from lezero.train.room import state_bytes
from tests.train.runs import config


@pytest.mark.parametrize(
    ("compute", "expected"),
    [("fp32", (16, 4 + 4 + 1.5, 4 + 1.5, 2)), ("bf16", (16, 4 + 2, 4, 2))],
)
def test_the_table_of_the_docs(tmp_path, compute, expected):
    made = config(tmp_path)
    zeros = [Zero(stage=stage, compute=compute) for stage in range(4)]
    assert [state_bytes(made, 8, zero) for zero in zeros] == list(expected)
    assert [state_bytes(made, 1, zero) for zero in (None, *zeros)] == [16] * 5


@pytest.mark.parametrize(
    ("optimizer", "masters", "expected"),
    [
        ("adamw", "none", 4 + 4 + 8),
        ("adamw8bit", "none", 4 + 4 + 2),
        ("adamw", "fp32", 2 + 2 + 8 + 4),
        ("adamw", "remainder", 2 + 2 + 8 + 2),
        ("adamw8bit", "remainder", 2 + 2 + 2 + 2),
    ],
)
def test_smaller_moments_and_weights_leave_more_room(tmp_path, optimizer, masters, expected):
    train = {"optimizer": optimizer, "masters": masters, "precision": "bf16", "steps": 4}
    made = config(tmp_path, train={**train, "batch": 8}, zero={"stage": 0})
    assert state_bytes(made, 1, made.zero) == expected
