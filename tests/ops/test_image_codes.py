"""Codes of images: every kernel gives the reference's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lezero.ops.image_codes import image_codes, reference
from lezero.ops.image_codes.native import NATIVE
from tests.ops.conformance import Args, OpConformance

TYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1, 1, 1), (3, 5, 7, 3), (2, 64, 9, 33), (1, 3, 200, 100), (5, 1000), (2, 3, 17))


def images(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


class TestImageCodes(OpConformance):
    native = NATIVE

    def cases(self) -> Iterator[tuple[str, Args]]:
        for dtype in TYPES:
            for shape in SHAPES:
                yield f"random {shape} {dtype}", (images(shape, dtype), 0.0371, 117)
            halves = torch.arange(-40, 600, dtype=torch.float32).view(2, -1) / 2
            yield f"ragged halves {dtype}", (halves.to(dtype), 1.0, 3)
            for name, value in (("nan", torch.nan), ("inf", torch.inf), ("-inf", -torch.inf)):
                poisoned = images((4, 3, 70, 90), dtype)
                poisoned[2, 1, 60, 3] = value
                yield f"{name} {dtype}", (poisoned, 0.02, 128)
        yield "empty", (torch.empty(0, 5), 1.0, 0)
        largest = torch.tensor([[3.4e38, -3.4e38, 1e-45, -0.0, 5e-39]])
        yield "ragged largest", (largest, 1e-3, 255)
        yield "ragged tiny scale", (images((2, 50)), torch.finfo(torch.float32).tiny, 0)

    def expected(self, x: Tensor, scale: float, zero: int) -> tuple[Tensor, ...]:
        return reference.image_codes(x, torch.tensor([scale]), torch.tensor([zero]))

    def kernel(self, ops: Any, x: Tensor, scale: float, zero: int) -> tuple[Tensor, ...]:
        codes = torch.empty_like(x, dtype=torch.uint8)
        bad = torch.empty(len(x), dtype=torch.bool)
        ops.image_codes(x, codes, bad, scale, float(zero))
        return codes, bad

    def public(self, x: Tensor, scale: float, zero: int) -> tuple[Tensor, ...]:
        return image_codes(x, torch.tensor([scale]), torch.tensor([zero]))


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(*[st.integers(1, 40)] * 4),
    scale=st.floats(1e-6, 1e3),
    zero=st.integers(0, 255),
    threads=st.integers(1, 3),
    layout=st.sampled_from(["contiguous", "channels last", "turned", "a part", "expanded"]),
    dtype=st.sampled_from([*TYPES, torch.float16]),
)
def test_codes_of_any_layout(
    shape: tuple[int, ...], scale: float, zero: int, threads: int, layout: str, dtype: torch.dtype
) -> None:
    x = images(shape, dtype)
    x = {
        "contiguous": x,
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "turned": x.permute(2, 0, 3, 1),
        "a part": x[:, :, : max(1, shape[2] // 2), ::2],
        "expanded": x[:1].expand(3, -1, -1, -1),
    }[layout]
    given = (torch.tensor([scale]), torch.tensor([zero]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = image_codes(x, *given)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found, reference.image_codes(x, *given), strict=True):
        assert torch.equal(one, other)
    last = layout == "channels last"
    assert found[0].is_contiguous(
        memory_format=torch.channels_last if last else torch.contiguous_format
    ) or layout in ("turned", "a part", "expanded")


def test_nothing_has_no_codes() -> None:
    for shape in ((0, 3, 4, 4), (2, 0, 4, 4)):
        codes, bad = image_codes(torch.empty(shape), torch.ones(1), torch.zeros(1))
        assert codes.shape == shape
        assert bad.tolist() == [False] * shape[0]


def test_without_a_kernel_torch_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (images((2, 3, 5, 5)), torch.tensor([0.1]), torch.tensor([7]))
    expected = image_codes(*given)
    monkeypatch.setattr(type(NATIVE), "available", lambda self: False)
    for one, other in zip(image_codes(*given), expected, strict=True):
        assert torch.equal(one, other)
