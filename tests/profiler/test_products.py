"""The short measurement of products: apart from what the caller's thread does."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lezero.profiler import products


def test_both_types_are_measured_once_whatever_the_caller_does() -> None:
    products._measured.cache_clear()
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        found = products.product_seconds()
    assert found.keys() == {"fp32", "bf16"}
    # Between a thousand times what the products take on any processor, and what fakes take.
    assert all(1e-5 < seconds < 10 for seconds in found.values())
    found.clear()
    assert products.product_seconds().keys() == {"fp32", "bf16"}
    assert products._measured.cache_info().misses == 1
