"""Errors that are kept in eight bits are right on average."""

from __future__ import annotations

import pytest
import torch

from lezero.comm.codec import codec
from lezero.comm.feedback import WORKER, Feedback
from lezero.comm.route import Span

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_small_gradients_beside_large_ones_are_paid(dtype: str) -> None:
    """Each grows by less than half a step of stored codes before it is sent."""
    kept, packed, small, steps = Feedback(0, 2, dtype, CPU), codec("int4"), 2e-4, 4000
    draw, spans = torch.Generator().manual_seed(0), (Span("w", 0, 300, 0),)
    sent, out = torch.zeros(300, dtype=torch.float64), torch.empty(300)
    payload = torch.empty(packed.bytes(300), dtype=torch.uint8)
    for _ in range(steps):
        x = torch.randn(300, generator=draw)
        x[::2] = small
        error = kept.error(WORKER, "k", 300, spans)
        packed.encode(x, payload, error)
        kept.keep(WORKER, "k", error)
        packed.decode(payload, out)
        sent += out
    assert float(sent[::2].mean()) / (small * steps) == pytest.approx(1, abs=0.05)


def test_small_errors_are_kept_on_average() -> None:
    """A hundredth of a step, and numbers that are to stay."""
    kept, size, spans = Feedback(0, 2, "int8", CPU), 70_000, (Span("w", 0, 70_000, 0),)
    x = torch.full((size,), 1e-4)
    x[::256], x[1::256], x[2] = 1.0, 0.0, -1.0
    found = torch.zeros(size, dtype=torch.float64)
    for _ in range(100):
        kept.error(WORKER, "k", size, spans).copy_(x)
        kept.keep(WORKER, "k", x.clone())
        found += kept.error(WORKER, "k", size, spans)
    small = x == x[3]
    assert float(found[small].mean()) / 100 == pytest.approx(1e-4, rel=0.05)
    assert torch.allclose(found[~small] / 100, x[~small].double(), atol=4e-3)
    assert float(found[x == 0].abs().max()) == 0
