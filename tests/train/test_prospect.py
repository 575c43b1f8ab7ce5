"""What a step is held against."""

from __future__ import annotations

import pytest

from lezero.train.prospect import Prospect


@pytest.mark.parametrize(
    ("ceiling", "seconds", "share"),
    [(4e9, 0.5, 0.5), (2e9, 0.5, 1.0), (1e9, 0.5, None), (None, 0.5, None), (4e9, 0.0, None)],
)
def test_a_ceiling_that_is_beaten_is_none(
    ceiling: float | None, seconds: float, share: float | None
) -> None:
    assert Prospect(1, 1.0, 1e9, ceiling).share_of_ceiling(seconds) == share
