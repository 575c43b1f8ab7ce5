"""What accelerators run is near the reference, W8A8 with a scale a row equal. Here on the CPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.ops import linear
from lezero.ops.linear import accelerator, embedding_int, in_rows, op, reference, to_rows
from tests.ops.test_linear import FLOATS, packed, seeded, spoiled

SHAPES = [(1, 5, 70), (3, 33, 64), (16, 16, 1), (17, 40, 129), (40, 50, 300), (0, 5, 70)]
"""M, N, K."""


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    accelerator._torch_multiplies_int8.cache_clear()
    yield
    accelerator._torch_multiplies_int8.cache_clear()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_whole_numbers_are_multiplied_as_such(
    M: int,
    N: int,
    K: int,
    rows: bool,
    static: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = packed(N, K, 8, 0, False, dtype)
    x = spoiled(M, K, 1.0 if M == 1 else torch.nan) if M else seeded(0, K)
    x_scale = torch.tensor(0.02) if static else None
    rest = (seeded(N) if N % 2 else None, x_scale, N, 8, 0, 8)
    wanted = reference.linear_int(x.to(dtype), weight, *rest)
    monkeypatch.setattr(Tensor, "double", None)
    weight = to_rows(weight, N, K, 8, 0) if rows else weight
    found = accelerator.linear_int(x.to(dtype), weight, *rest)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("inputs", [(8, 0), (8, 32), (16, 0)])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("form", [(8, 32, False), (8, 0, True), (4, 64, True), (4, 0, False)])
def test_other_forms_are_near(
    form: tuple[int, int, bool],
    rows: bool,
    inputs: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bits, group, zero = form
    x, weight = spoiled(20, 200, torch.inf), packed(50, 200, bits, group, zero, torch.float32)
    rest = (seeded(50), None, 50, bits, group, *inputs)
    wanted = reference.linear_int(x, weight, *rest)
    monkeypatch.setattr(Tensor, "double", None)
    weight = to_rows(weight, 50, 200, bits, group) if rows else weight
    found = accelerator.linear_int(x, weight, *rest)
    # Of 16 bits the reference takes fixed point, of 8 both do.
    near = 1e-4 if inputs[0] == 8 else 3e-3
    for part in (slice(0, 10), slice(11, 20)):
        torch.testing.assert_close(found[part], wanted[part], rtol=near, atol=near)
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


class Kernels:
    """Stands in for the kernels of Triton, and knows which were launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[str] = []
        kernels = {
            "triton_few": ("suits", "linear_few"),
            "triton_rows": ("dequantize", "embedding"),
            "triton_tokens": ("quantize_tokens",),
            "triton_w8a8": ("linear_w8a8",),
        }
        for name, calls in kernels.items():
            stub = SimpleNamespace(**{call: getattr(self, call) for call in calls})
            monkeypatch.setitem(sys.modules, f"lezero.ops.linear.{name}", stub)
            monkeypatch.setattr(linear, name, stub, raising=False)
        monkeypatch.setattr(accelerator, "triton_runs", lambda place: True)

    def suits(self, dtype: torch.dtype, bits: int, group: int) -> bool:
        return dtype != torch.float32 and group != 96

    def linear_few(self, x: Tensor, weight: Any, bias: Tensor | None, *sizes: int) -> Tensor:
        assert in_rows(weight)
        self.launched.append("few")
        return torch.nn.functional.linear(x, self._wide(weight, *sizes, x.dtype))

    def dequantize(self, *args: Any) -> Tensor:
        self.launched.append("dequantize")
        return self._wide(*args)

    def embedding(self, *args: Any) -> Tensor:
        self.launched.append("embedding")
        return reference.embedding(*args)

    def quantize_tokens(self, x: Tensor, scale: Any, columns: int) -> tuple[Tensor, Tensor]:
        self.launched.append("tokens")
        codes, steps = accelerator.quantize_tokens(x, scale)
        return torch.nn.functional.pad(codes, (0, columns - x.shape[1])), steps

    def linear_w8a8(
        self, a: Tensor, token: Tensor, weight: Tensor, scale: Tensor, *rest: Any
    ) -> Tensor:
        self.launched.append("w8a8")
        factor = token[:, None] * scale.float().T
        return reference.finish(a.float() @ weight.float().T, factor, *rest)

    def _wide(self, weight: Any, *rest: Any) -> Tensor:
        *sizes, dtype = rest
        return reference.dequantize_packed(weight, *sizes).to(dtype)


CHOICES = {
    "few": ((64, torch.bfloat16, 4, 32, 16), ["few"]),
    "few, fp16": ((1, torch.float16, 8, 0, 16), ["few"]),
    "many": ((65, torch.bfloat16, 4, 32, 16), ["dequantize"]),
    "a group that few do not have": ((4, torch.bfloat16, 8, 96, 16), ["dequantize"]),
    "fp32": ((1, torch.float32, 4, 32, 16), ["dequantize"]),
    "W8A8": ((1, torch.bfloat16, 8, 0, 8), ["tokens", "w8a8"]),
    "W8A8, many": ((100, torch.float32, 8, 0, 8), ["tokens", "w8a8"]),
    "W8A8 in groups": ((4, torch.bfloat16, 8, 32, 8), ["tokens", "few"]),
    "W4A8, many": ((100, torch.bfloat16, 4, 32, 8), ["tokens", "dequantize"]),
    "none": ((0, torch.bfloat16, 4, 32, 16), []),
}


@pytest.mark.parametrize("name", CHOICES)
def test_kernels_are_chosen_by_tokens_and_types(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (M, dtype, bits, group, x_bits), wanted = CHOICES[name]
    kernels = Kernels(monkeypatch)
    x, weight = seeded(M, 96).to(dtype), packed(40, 96, bits, group, False, torch.float32)
    rest = (None, None, 40, bits, group, x_bits)
    found = accelerator.linear_int(x, weight, *rest)
    assert kernels.launched == wanted
    if M:
        near = reference.linear_int(x, weight, *rest)
        torch.testing.assert_close(found, near, rtol=2e-2, atol=0.3)
    assert found.dtype == dtype
    assert found.shape == (M, 40)


def test_rows_are_looked_up_and_dequantized_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch)
    panels = packed(40, 96, 4, 32, False, torch.float32)
    weight, ids = to_rows(panels, 40, 96, 4, 32), torch.tensor([3, 1])
    for held, launched in ((weight, ["embedding", "dequantize"]), (panels, [])):
        kernels.launched.clear()
        found = accelerator.embedding(ids, held, 96, 4, 32, torch.float32)
        wanted = accelerator.dequantize(held, 40, 96, 4, 32, torch.float32)
        assert torch.equal(found, wanted[ids])
        assert kernels.launched == launched
    assert torch.equal(embedding_int(ids, weight, in_features=96, bits=4, group=32), found)


def test_the_op_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(x_MK: Tensor, *rest: Any) -> Tensor:
        seen.append((tuple(x_MK.shape), rest[2:]))
        return x_MK.new_empty(len(x_MK), 40)

    monkeypatch.setattr(accelerator, "linear_int", spy)
    weight = [x if x is None else x.to("meta") for x in packed(40, 96, 8, 0, False, torch.float32)]
    out = op._int(torch.empty(2, 3, 96, device="meta"), *weight, None, None, 40, 8, 0, 8)  # type: ignore[arg-type]
    assert tuple(out.shape) == (2, 3, 40)
    assert seen == [((6, 96), (None, 40, 8, 0, 8, 0))]
