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
        ((1, 2, 32, 8), {"group": 0}),
        ((1, 2, 32, 8), {"group": 4.0}),
        ((1, 2, 32, 8), {"group": True}),
        ((2, 32, 8), {}),
        ((1, 2, 4, 7), {"bits": 4}),
        ((1, 2, 4, 8), {"bits": 3}),
    ],
)
def test_what_does_not_fit_is_refused(shape, given):
    with pytest.raises(lz.ConfigError, match="quantize_kv"):
        quantize_kv(torch.zeros(shape), **given)
    with pytest.raises(lz.ConfigError, match="got a list"):
        quantize_kv([1.0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("along", ["channel", "token"])
def test_what_is_not_finite_makes_its_group_nan(value, along):
    x = torch.randn(1, 1, 64, 8)
    x[0, 0, 40, 3] = value
    back = dequantize_kv(quantize_kv(x, bits=4, along=along))
    spoiled = torch.zeros(64, 8, dtype=torch.bool)
    if along == "channel":
        spoiled[40] = True
    else:
        spoiled[32:, 3] = True
    assert torch.equal(back[0, 0].isnan(), spoiled)


@pytest.mark.parametrize("along", ["channel", "token"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1e-6, 1.0, 5e3])
def test_no_element_is_further_off_than_half_a_step(size, dtype, bits, along):
    made = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, 32, 16, generator=made, dtype=torch.float64) * size
    x += torch.tensor([0.0, 5.0, -30.0, 60.0]).repeat(4) * size / 30
    x = x.to(dtype)
    kept = quantize_kv(x, bits=bits, group=8, along=along)
    dim = 3 if along == "channel" else 2
    step = kept.scale.double().repeat_interleave(8, dim)
    wide = x.double()
    assert ((dequantize_kv(kept).double() - wide).abs() <= step / 2 + 1e-6 * wide.abs()).all()
    groups = wide if along == "channel" else wide.transpose(2, 3)
    groups = groups.unflatten(-1, (-1, 8))
    spread = groups.amax(-1) - groups.amin(-1)
    spread = spread if along == "channel" else spread.transpose(2, 3)
    least = 2.0**-24 if dtype == torch.float16 else 0.0  # the least that fp16 holds
    assert (kept.scale.double() <= spread / (2**bits - 1) * 1.01 + least).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_offset_of_a_channel_costs_no_accuracy(dtype):
    x = torch.randn(1, 2, 128, 4, generator=torch.Generator().manual_seed(2))
    offsets = torch.tensor([20.0, -30.0, 60.0, 100.0])
    moved = (x + offsets).to(dtype)
    plain = (moved.double() - offsets).float()  # what `moved` has left of the variation
    back = dequantize_kv(quantize_kv(moved, bits=4, along="token")) - offsets
    assert (back - plain).norm() / plain.norm() < 0.1


def test_zero_is_the_least_value_and_constant_groups_are_exact():
    x = torch.randn(1, 2, 64, 6, dtype=torch.bfloat16)
    kept = quantize_kv(x, bits=4, along="token")
    assert torch.equal(kept.zero, x.unflatten(2, (2, 32)).amin(3))
    x = torch.tensor([3.3, -0.1, 0.0, 1e30, -7e-30, 100.0]).expand(1, 1, 32, 6)
    assert torch.equal(dequantize_kv(quantize_kv(x, along="token")), x)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_ends_of_a_type_stay_finite(dtype, bits):
    most = torch.finfo(dtype).max
    x = torch.tensor([most, -most, most / 2, 0.0], dtype=dtype).view(1, 1, 1, 4)
    back = dequantize_kv(quantize_kv(x, bits=bits), dtype)
    assert (back.double() - x.double()).abs().max() <= 1.02 * most / (2**bits - 1)


def test_spreads_without_an_inverse_are_no_further_off_than_half_a_step():
    x = torch.linspace(0, 1e-38, 8).view(1, 1, 1, 8)
    kept = quantize_kv(x)
    assert ((dequantize_kv(kept) - x).abs() <= kept.scale.float() / 2).all()


def test_bytes_are_those_of_codes_scales_and_least_values():
    for dtype, of_a_group in ((torch.bfloat16, 4), (torch.float16, 4), (torch.float32, 6)):
        x = torch.randn(2, 3, 64, 32).to(dtype)
        for bits in (4, 8):
            kept = quantize_kv(x, bits=bits, along="token")
            assert kept.nbytes == x.numel() * bits // 8 + x.numel() // 32 * of_a_group


@pytest.mark.parametrize("along", ["channel", "token"])
def test_no_tokens_are_kept_as_none(along):
    x = torch.zeros(1, 2, 0, 8)
    kept = quantize_kv(x, bits=4, along=along)
    assert kept.nbytes == 0
    assert dequantize_kv(kept).shape == x.shape


def test_nothing_of_a_graph_is_kept():
    kept = quantize_kv(torch.randn(1, 1, 4, 8, requires_grad=True))
    assert not any(part.requires_grad for part in (kept.codes, kept.scale, kept.zero))
