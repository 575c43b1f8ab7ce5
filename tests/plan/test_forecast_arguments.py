"""Arguments of another kind are told before anything is measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from lezero.core.errors import ConfigError
from lezero.plan import StepSpec, forecast


def never() -> nn.Module:
    raise AssertionError("the model was built")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("limit_bytes", {"limit_bytes": "4GiB"}),
        ("limit_bytes", {"limit_bytes": 0}),
        ("limit_bytes", {"limit_bytes": -5}),
        ("limit_bytes", {"limit_bytes": 1e9}),
        ("hardware", {"hardware": "a100.json"}),
        ("hardware", {"hardware": {"gemm_fp32": 1e12}}),
        ("spec", {"spec": {"batch": 2, "tokens": 8}}),
    ],
)
def test_arguments_of_another_kind_are_named(field: str, changes: dict[str, Any]) -> None:
    given = {"spec": StepSpec(batch=2, tokens=8), **changes}
    with pytest.raises(ConfigError, match=f"^{field}: got .*, allowed is"):
        forecast(never, **given)


def test_a_count_may_be_any_whole_number_and_no_truth() -> None:
    spec = StepSpec(batch=np.int64(2), tokens=8)  # type: ignore[arg-type]
    assert (spec.batch, type(spec.batch)) == (2, int)
    with pytest.raises(ConfigError, match="batch: got True, allowed is"):
        StepSpec(batch=True, tokens=8)
