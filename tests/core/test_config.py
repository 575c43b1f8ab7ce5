"""The base of configs: what pydantic would let through, and how errors read."""

from __future__ import annotations

from typing import Literal

import pytest

from lezero.core.config import Config
from lezero.core.errors import ConfigError


class Inner(Config):
    count: int = 1


class Sample(Config):
    inner: Inner = Inner()
    steps: int | None = 1
    rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    stage: Literal[0, 1] = 0
    limits: dict[str, int] = {}  # noqa: RUF012  (pydantic copies defaults)
    either: bool | int = 0
    flag: bool = False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": True}, "steps: got True, allowed is a valid integer"),
        ({"rate": False}, "rate: got False, allowed is a valid number"),
        ({"betas": [0.9, True]}, "betas: got [0.9, True], allowed is a valid number"),
        ({"stage": True}, "stage: got True"),
        ({"limits": {"a": True}}, "limits: got {'a': True}"),
        ({"inner": {"count": True}}, "inner.count: got True"),
    ],
)
def test_true_is_no_number(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match="got") as caught:
        Sample.parse(given, "run.yaml")
    assert str(caught.value).startswith(f"run.yaml: {said}")


def test_fields_that_take_truth_values_still_do() -> None:
    sample = Sample(either=True, flag=True)
    assert sample.either is True
    assert sample.flag is True
    assert sample.steps == 1
