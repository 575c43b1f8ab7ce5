"""Operations timed alone."""

from __future__ import annotations

import threading

import torch

from lezero.plan.measure import time_call
from lezero.plan.trace import Call, TensorFact

aten = torch.ops.aten


def fact(*shape: int, dtype: torch.dtype = torch.float32) -> TensorFact:
    stride = torch.empty(shape, device="meta").stride()
    return TensorFact(shape, tuple(stride), dtype)


def product(m: int, k: int, n: int) -> Call:
    return Call(aten.mm.default, (fact(m, k), fact(k, n)), {}, "aten.mm.default")


def test_a_call_that_cannot_run_alone_gives_nothing() -> None:
    assert time_call(Call(aten.mm.default, (fact(2, 3), fact(5, 2)), {}, "aten.mm.default")) is None


def test_what_cannot_be_made_small_enough_is_not_tried() -> None:
    vast = fact(1 << 40)
    assert time_call(Call(aten.ones.default, ((1 << 40,),), {}, "aten.ones", (vast,))) is not None
    assert time_call(Call(aten.sum.default, (), {}, "aten.sum", (vast,) * 1024)) is None


def test_neighbours_compute_meanwhile_and_stop() -> None:
    timed = time_call(product(64, 64, 64), neighbours=2)
    assert timed is not None
    assert threading.active_count() == 1
