"""Operations timed alone: made-up arguments that are valid, smaller ones that scale."""

from __future__ import annotations

import pytest
import torch

from lezero.plan.measure import argument_sets, attention_flops, flops, shrink, time_call, work_bytes
from lezero.plan.trace import Call, TensorFact

aten = torch.ops.aten


def fact(*shape: int, dtype: torch.dtype = torch.float32) -> TensorFact:
    stride = torch.empty(shape, device="meta").stride()
    return TensorFact(shape, tuple(stride), dtype)


def product(m: int, k: int, n: int) -> Call:
    return Call(aten.mm.default, (fact(m, k), fact(k, n)), {}, "aten.mm.default")


def test_flops_of_a_product() -> None:
    assert flops(product(3, 5, 7)) == 2 * 3 * 5 * 7


def test_flops_of_attention_count_the_triangle_once() -> None:
    q = fact(2, 4, 128, 64)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    key = "aten._scaled_dot_product_flash_attention_for_cpu.default("
    assert attention_flops(Call(op, (q, q, q, 0.0, True), {}, key)) == 4 * 2 * 4 * 128 * 128 * 32


def test_a_large_product_is_cut_and_scaled() -> None:
    large = product(1 << 15, 1 << 13, 1 << 13)
    smaller, scale = shrink(large)
    assert flops(smaller) * scale == flops(large)
    assert flops(smaller) < flops(large) / 100


def test_a_large_elementwise_call_is_cut_and_scaled() -> None:
    large = Call(aten.add.Tensor, (fact(1 << 12, 1 << 16), fact(1 << 12, 1 << 16)), {}, "aten.add")
    smaller, scale = shrink(large)
    assert work_bytes(smaller) * scale == pytest.approx(work_bytes(large))
    assert work_bytes(smaller) < 200 << 20


def test_lists_are_cut_alike() -> None:
    many = tuple(fact(1 << 20) for _ in range(256))
    smaller, scale = shrink(Call(aten._foreach_mul_.Scalar, (many, 0.5), {}, "aten._foreach_mul_"))
    assert scale * len(smaller.args[0]) == 256


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


def test_a_call_that_cannot_run_alone_gives_nothing() -> None:
    assert time_call(Call(aten.mm.default, (fact(2, 3), fact(5, 2)), {}, "aten.mm.default")) is None


def test_neighbours_compute_meanwhile_and_stop() -> None:
    import threading

    timed = time_call(product(64, 64, 64), neighbours=2)
    assert timed is not None
    assert threading.active_count() == 1
