"""How much work an operation is, and what smaller one stands for it."""

from __future__ import annotations

import pytest
import torch

import lezero.ops.attention  # noqa: F401 - registers lezero::attention
from lezero.plan.calls import Call, TensorFact
from lezero.plan.work import attention_flops, flops, shrink, small_enough, tensor_facts, work_bytes

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


def test_only_the_flag_of_the_triangle_is_taken_for_it() -> None:
    q, whole = fact(2, 4, 128, 64), 4 * 2 * 4 * 128 * 128 * 64
    op = aten._scaled_dot_product_efficient_attention.default
    key = "aten._scaled_dot_product_efficient_attention.default("
    for args, kwargs, expected in (
        ((q, q, q, None, True), {}, whole),  # it is to return the sums
        ((q, q, q, None, True, 0.0, True), {}, whole / 2),
        ((q, q, q, None, False), {"is_causal": True}, whole / 2),
    ):
        assert attention_flops(Call(op, args, kwargs, key)) == expected
    ours = torch.ops.lezero.attention.default
    for causal, expected in ((True, whole / 2), (False, whole)):
        call = Call(ours, (q, q, q, causal, 0.125), {}, "lezero.attention.default(")
        assert attention_flops(call) == expected
        given = (q, q, q, q, q, fact(2, 4, 128), causal, 0.125)
        back = torch.ops.lezero.attention_backward.default
        call = Call(back, given, {}, "lezero.attention_backward.default(")
        assert attention_flops(call) == 2.5 * expected


def test_a_large_product_is_cut_and_scaled() -> None:
    large = product(1 << 15, 1 << 13, 1 << 13)
    smaller, scale = shrink(large)
    assert flops(smaller) * scale == flops(large)
    assert flops(smaller) < flops(large) / 100


@pytest.mark.parametrize("samples", [1, 4])
def test_long_attention_is_cut_to_what_runs_in_a_moment(samples: int) -> None:
    q, sums = fact(samples, 4, 100_000, 16), fact(samples, 4, 100_000)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    op, back = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    forward = Call(op, (q, q, q, 0.0, True), {}, f"aten.{name}.default(", (q, sums))
    given = (q, q, q, q, q, sums, 0.0, True)
    backward = Call(back, given, {}, f"aten.{name}_backward.default(")
    for call in (forward, backward):
        smaller, scale = shrink(call)
        assert attention_flops(smaller) < 1e10
        assert attention_flops(smaller) * scale == pytest.approx(attention_flops(call))
        assert {f.shape[2] for f in tensor_facts(smaller.args)} == {smaller.args[0].shape[2]}
        assert smaller.args[0].shape[:2] == (samples, 4)  # which threads share


def test_a_large_elementwise_call_is_cut_and_scaled() -> None:
    large = Call(aten.add.Tensor, (fact(1 << 12, 1 << 16), fact(1 << 12, 1 << 16)), {}, "aten.add")
    smaller, scale = shrink(large)
    assert work_bytes(smaller) * scale == pytest.approx(work_bytes(large))
    assert work_bytes(smaller) < 200 << 20


def test_lists_are_cut_alike() -> None:
    many = tuple(fact(1 << 20) for _ in range(256))
    smaller, scale = shrink(Call(aten._foreach_mul_.Scalar, (many, 0.5), {}, "aten._foreach_mul_"))
    assert scale * len(smaller.args[0]) == 256


def test_what_a_call_returns_is_bounded_too() -> None:
    rows, index = fact(320, 32), fact(1 << 23, 32, dtype=torch.int64)
    out = (fact(1 << 23, 32, 32),)
    call = Call(aten.embedding.default, (rows, index), {}, "aten.embedding.default", out)
    smaller, scale = shrink(call)
    assert not small_enough(call)
    assert small_enough(smaller)
    assert scale == pytest.approx(work_bytes(call) / work_bytes(smaller))


def test_a_list_that_is_joined_is_cut_in_its_tensors() -> None:
    part = fact(1 << 23, 32, 8)
    call = Call(aten.cat.default, ((part, part), -1), {}, "aten.cat", (fact(1 << 23, 32, 16),))
    smaller, scale = shrink(call)
    assert len(smaller.args[0]) == 2
    assert small_enough(smaller)
    assert smaller.args[0][0].shape == (int((1 << 23) / scale), 32, 8)


def test_flags_are_widened_inside_a_kernel() -> None:
    flags = Call(aten.sum.default, (fact(1 << 28, dtype=torch.bool),), {}, "aten.sum", (fact(),))
    assert not small_enough(flags)
    assert small_enough(shrink(flags)[0])
