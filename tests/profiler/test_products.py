"""The short measurement of products: apart from what the caller's thread does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lezero.profiler import products


def test_both_types_are_measured_once_whatever_the_caller_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Tensor] = []
    real = products._product

    def product(square: Tensor) -> object:
        call = real(square)
        made.append(call())
        return call

    monkeypatch.setattr(products, "_product", product)
    products._measured.cache_clear()
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        found = products.product_seconds()
    assert found.keys() == {"fp32", "bf16"}
    assert all(0 < seconds < 10 for seconds in found.values())
    assert [(type(out), out.dtype, out.device.type) for out in made] == [
        (Tensor, torch.float32, "cpu"),
        (Tensor, torch.bfloat16, "cpu"),
    ]
    found.clear()
    assert products.product_seconds().keys() == {"fp32", "bf16"}
    assert products._measured.cache_info().misses == 1
