"""Made-up arguments are valid: indices in range, numbers small and positive."""

from __future__ import annotations

import pytest
import torch

from lezero.plan.arguments import argument_sets
from lezero.plan.calls import Call, TensorFact
from lezero.plan.measure import time_call

aten = torch.ops.aten


def fact(*shape: int, dtype: torch.dtype = torch.float32) -> TensorFact:
    stride = torch.empty(shape, device="meta").stride()
    return TensorFact(shape, tuple(stride), dtype)


def test_indices_are_allowed_ones() -> None:
    call = Call(
        aten.embedding.default,
        (fact(10, 4), fact(3, 100, dtype=torch.int64)),
        {},
        "aten.embedding.default(",
    )
    args, _ = argument_sets(call)[0]
    assert 0 <= int(args[1].min()) <= int(args[1].max()) < 10
    timed = time_call(call)
    assert timed is not None
    assert timed[0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_made_up_numbers_are_small_and_positive(dtype: torch.dtype) -> None:
    call = Call(aten.rsqrt.default, (fact(64, 64, dtype=dtype),), {}, "aten.rsqrt.default")
    args, _ = argument_sets(call)[0]
    assert bool(((args[0] > 0) & (args[0] < 10)).all())
