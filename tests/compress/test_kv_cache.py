"""Keys and values in 4 and 8 bits."""

from __future__ import annotations

import pytest
import torch

import lezero as lz
from lezero.compress.quantize.kv_cache import dequantize_kv, quantize_kv


@pytest.mark.parametrize("along", ["channel", "token"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_come_back_near(bits, along, dtype):
    made = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 64, 32, generator=made).to(dtype)
    x[:, 1, :, 5] *= 20
    kept = quantize_kv(x, bits=bits, along=along)
    back = dequantize_kv(kept, dtype)
    assert back.shape == x.shape
    assert back.dtype == dtype
    span = 1 if along == "channel" else 0.4  # an outlier channel costs only those it shares with
    error = float((back.float() - x.float()).norm() / x.float().norm())
    assert error < span * {4: 0.2, 8: 0.03}[bits] + 0.01
    assert kept.nbytes < {4: 0.40, 8: 0.66}[bits] * x.nbytes * 2 / x.element_size()


def test_groups_of_channels():
    x = torch.randn(1, 2, 5, 64)
    kept = quantize_kv(x, bits=4, group=16)
    assert kept.scale.shape == (1, 2, 5, 4)
    assert dequantize_kv(kept).shape == x.shape


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((1, 2, 33, 8), {"along": "token"}),
        ((1, 2, 32, 8), {"group": 3}),
        ((2, 32, 8), {}),
        ((1, 2, 4, 7), {"bits": 4}),
        ((1, 2, 4, 8), {"bits": 3}),
    ],
)
def test_what_does_not_fit_is_refused(shape, given):
    with pytest.raises(lz.ConfigError, match="quantize_kv"):
        quantize_kv(torch.zeros(shape), **given)


def test_nan_stays_nan():
    x = torch.randn(1, 1, 4, 8)
    x[0, 0, 2, 3] = torch.nan
    back = dequantize_kv(quantize_kv(x))
    assert back[0, 0, 2].isnan().all()
    assert back[0, 0, :2].isfinite().all()
