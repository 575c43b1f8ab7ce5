"""What every observer must do; the tests of a new one inherit `ObserverConformance`."""

from __future__ import annotations

import pytest
import torch

from lezero.compress.quantize.observers import Observer


class ObserverConformance:
    observer: type[Observer]

    @pytest.mark.parametrize("levels", [16, 256])
    def test_the_range_lies_within_what_was_seen(self, levels):
        made = torch.Generator().manual_seed(0)
        x = torch.randn(3, 4000, generator=made) * torch.tensor([[0.1], [1.0], [50.0]])
        observer = self.observer(3)
        for part in x.split(1000, dim=1):
            observer.observe(part)
        low, high = observer.range(levels)
        assert low.shape == high.shape == (3,)
        assert low.dtype == high.dtype == torch.float32
        assert (low <= 0).all()
        assert (high >= 0).all()
        assert (low >= x.amin(1) - 1e-6).all()
        assert (high <= x.amax(1) + 1e-6).all()
        assert (high - low > 0.05 * (x.amax(1) - x.amin(1))).all()

    def test_later_batches_may_be_larger(self):
        observer = self.observer()
        observer.observe(torch.linspace(-1, 1, 1001)[None])
        observer.observe(torch.linspace(-64, 64, 100001)[None])
        low, high = observer.range(256)
        assert high > 16
        assert low < -16

    @pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
    def test_constants_have_a_range(self, value):
        observer = self.observer()
        observer.observe(torch.full((1, 50), value))
        low, high = observer.range(256)
        assert float(low) == pytest.approx(min(value, 0), abs=0.01)
        assert float(high) == pytest.approx(max(value, 0), abs=0.01)

    def test_a_16_bit_batch_is_taken(self):
        observer = self.observer()
        observer.observe(torch.randn(1, 100, dtype=torch.bfloat16))
        assert observer.range(256)[1].dtype == torch.float32
