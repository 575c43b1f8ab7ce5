"""What accelerators run is near the reference, W8A8 with a scale a row equal. Here on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.ops.linear import accelerator, op, reference
from tests.ops.test_linear import FLOATS, packed, seeded, spoiled

SHAPES = [(1, 5, 70), (3, 33, 64), (16, 16, 1), (17, 40, 129), (40, 50, 300)]
"""M, N, K."""


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    accelerator._multiplies_int8.cache_clear()
    yield
    accelerator._multiplies_int8.cache_clear()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_whole_numbers_are_multiplied_as_such(
    M: int, N: int, K: int, static: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = packed(N, K, 8, 0, False, dtype), spoiled(M, K, 1.0 if M == 1 else torch.nan)
    x_scale = torch.tensor(0.02) if static else None
    args = (x.to(dtype), weight, seeded(N) if N % 2 else None, x_scale, N, 8, 0, 8)
    wanted = reference.linear_int(*args)
    monkeypatch.setattr(Tensor, "double", None)
    torch.testing.assert_close(
        accelerator.linear_int(*args), wanted, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("x_bits", [8, 16])
@pytest.mark.parametrize("form", [(8, 32, False), (8, 0, True), (4, 64, True), (4, 0, False)])
def test_other_forms_are_near(
    form: tuple[int, int, bool], x_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits, group, zero = form
    x, weight = spoiled(20, 200, torch.inf), packed(50, 200, bits, group, zero, torch.float32)
    args = (x, weight, seeded(50), None, 50, bits, group, x_bits)
    wanted = reference.linear_int(*args)
    monkeypatch.setattr(Tensor, "double", None)
    found = accelerator.linear_int(*args)
    # Of 16 bits the reference takes fixed point, of 8 both do.
    near = 1e-4 if x_bits == 8 else 3e-3
    for rows in (slice(0, 10), slice(11, 20)):
        torch.testing.assert_close(found[rows], wanted[rows], rtol=near, atol=near)
    assert not found[10].isfinite().any()


def test_without_units_for_int8_it_is_a_dense_product(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Tensor:
        raise NotImplementedError("no kernel for '_int_mm'\nhere")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    x, weight = seeded(20, 96), packed(40, 96, 8, 0, False, torch.float32)
    with caplog.at_level(logging.INFO, "lezero.ops"):
        for _ in range(2):
            found = accelerator.linear_int(x, weight, None, None, 40, 8, 0, 8)
    wanted = reference.linear_int(x, weight, None, None, 40, 8, 0, 8)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "does not multiply int8 on cpu (no kernel for '_int_mm'): " in said


def test_the_op_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(x_MK: Tensor, *rest: Any) -> Tensor:
        seen.append((tuple(x_MK.shape), rest[2:]))
        return x_MK.new_empty(len(x_MK), 40)

    monkeypatch.setattr(accelerator, "linear_int", spy)
    weight = [x if x is None else x.to("meta") for x in packed(40, 96, 8, 0, False, torch.float32)]
    out = op._int(torch.empty(2, 3, 96, device="meta"), *weight, None, None, 40, 8, 0, 8)  # type: ignore[arg-type]
    assert tuple(out.shape) == (2, 3, 40)
    assert seen == [((6, 96), (None, 40, 8, 0, 8))]
