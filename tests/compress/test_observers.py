"""Observers: each keeps the contract; what each is for."""

from __future__ import annotations

import pytest
import torch

import lezero as lz
from lezero.compress.quantize.observers import (
    KLDivergence,
    MeanSquaredError,
    MinMax,
    Percentile,
    arranged,
    observers,
    weight_scale,
)
from lezero.ops.quantize import Grid, dequantize, find_scale, quantize
from lezero.profiler import MemorySampler
from tests.compress.observer_conformance import ObserverConformance
from tests.ranks import RankPool


class TestMinMax(ObserverConformance):
    observer = MinMax


class TestPercentile(ObserverConformance):
    observer = Percentile


class TestKL(ObserverConformance):
    observer = KLDivergence


class TestMSE(ObserverConformance):
    observer = MeanSquaredError


def kept(name: str, x: torch.Tensor) -> float:
    observer = observers.get(name)()
    observer.observe(x[None])
    low, high = observer.range(256, symmetric=True)
    return float(torch.maximum(high, -low))


def test_an_outlier_is_kept_by_minmax_and_cut_by_the_others():
    made = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(200_000, generator=made), torch.tensor([100.0])])
    assert kept("minmax", x) == 100
    for name in ("percentile", "kl", "mse"):
        assert 3.0 < kept(name, x) < 60, name


def test_zeros_after_a_relu_do_not_decide():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=made).relu()
    assert kept("kl", x) > 0.6 * float(x.max())


def test_mse_has_the_least_error():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(50_000, generator=made) ** 3

    def error(name: str) -> float:
        step = kept(name, x) / 127
        return float((torch.round(x / step).clamp(-127, 127) * step - x).square().mean())

    assert error("mse") <= min(error(name) for name in ("minmax", "kl")) * 1.02


def squared_error(x: torch.Tensor, low: float, high: float, symmetric: bool) -> float:
    """Of 8-bit codes that cover low … high."""
    if symmetric:
        step = max(high, -low) / 127
        codes = torch.round(x / step).clamp(-127, 127)
    else:
        step = (high - low) / 255
        zero = round(-low / step)
        codes = (torch.round(x / step) + zero).clamp(0, 255) - zero
    return float((codes * step - x).square().mean())


def activations() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    x, F = 3 * torch.randn(1 << 17, generator=made), torch.nn.functional
    gelu, silu = F.gelu(x), F.silu(x)
    some = {"relu": x.relu(), "leaky_relu": F.leaky_relu(x), "gelu": gelu, "silu": silu}
    some |= {"hardswish": F.hardswish(x), "elu": F.elu(x), "tanh": x.tanh(), "normal": x}
    for name, most in (("far", 1000.0), ("farther", 6000.0)):
        some |= {name: torch.cat([x, torch.tensor([most])])}
    return some


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", activations())
def test_mse_is_as_good_as_the_best_of_all_cuts(name: str, symmetric: bool) -> None:
    x = activations()[name]
    low, high = min(0.0, float(x.min())), float(x.max())
    observer = MeanSquaredError()
    observer.observe(x[None])
    found = [float(bound) for bound in observer.range(256, symmetric)]
    most = max(high, -low)
    cuts = [(max(low, -most * i / 100), min(high, most * i / 100)) for i in range(4, 101)]
    best = min(squared_error(x, *cut, symmetric) for cut in cuts)
    assert squared_error(x, *found, symmetric) <= 1.02 * best


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", ["leaky_relu", "gelu", "silu", "hardswish"])
def test_what_lies_close_below_0_does_not_decide(name: str, symmetric: bool) -> None:
    def highest(name: str) -> float:
        observer = KLDivergence()
        observer.observe(activations()[name][None])
        return float(observer.range(256, symmetric)[1])

    assert highest(name) > 0.75 * highest("relu")


@pytest.mark.parametrize(  # "kl" has other noise with bins of another width
    ("name", "times"),
    [("percentile", 1.2), ("percentile", 4.0), ("mse", 1.2), ("mse", 4.0), ("kl", 4.0)],
)
def test_values_that_came_before_larger_ones_keep_their_places(name: str, times: float) -> None:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(1, 400_000, generator=made)
    larger = times * x.abs().amax(1, keepdim=True)
    one, parts = observers.get(name)(), observers.get(name)()
    one.observe(torch.cat([x, larger], 1))
    for part in (x, larger):
        parts.observe(part)
    torch.testing.assert_close(parts.range(256), one.range(256), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", ["percentile", "kl", "mse"])
@pytest.mark.parametrize("size", [1e-31, 1e-37])
def test_values_may_be_of_any_size(name: str, size: float) -> None:
    x = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    observer = observers.get(name)()
    observer.observe(x * size)
    low, high = observer.range(256, symmetric=True)
    assert kept(name, x[0]) == pytest.approx(float(torch.maximum(high, -low)) / size, rel=0.02)


@pytest.mark.parametrize("name", ["percentile", "kl", "mse"])
def test_values_may_be_as_large_as_32_bits_hold(name: str) -> None:
    """Twice the width that came first is more than they do."""
    x = torch.rand(1, 50_000, generator=torch.Generator().manual_seed(0))
    observer = observers.get(name)()
    for size in (2e38, 3.4e38):
        observer.observe(x * size)
    low, high = observer.range(256)
    assert low == 0
    assert 3e38 < float(high) <= 3.4e38


def test_kl_is_the_same_by_any_default_type() -> None:
    x = 1e-9 * torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0)).float()
    observer = observers.get("kl")()
    observer.observe(x)
    wanted, before = observer.range(256), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(torch.stack(observer.range(256)), torch.stack(wanted))
    finally:
        torch.set_default_dtype(before)


def test_values_of_one_sign_have_half_of_the_codes_of_a_linear_layer() -> None:
    made = torch.Generator().manual_seed(0)
    x, layer = torch.randn(400, 64, generator=made).relu() ** 2, torch.nn.Linear(64, 64)
    model = torch.nn.Sequential(layer)
    scheme = lz.Int8WeightActivation(activations="tensor", observer="mse", smooth=None)
    lz.quantize_(model, scheme, data=x, objective="size")

    def error(step: float) -> float:
        return float((torch.round(x / step).clamp(-127, 127) * step - x).square().mean())

    best = min(error(float(x.max()) / 127 * share / 200) for share in range(20, 201))
    assert error(float(layer.input_scale)) <= 1.02 * best


def observed(name: str) -> int:
    """In a process of its own: bytes that an observer takes for 64 MiB of values."""
    torch.set_num_threads(1)
    x, observer = torch.randn(1, 1 << 24), observers.get(name)()
    observer.observe(x[:, :1000])
    with MemorySampler() as memory:
        observer.observe(x)
    return memory.above


@pytest.mark.parametrize("name", ["percentile", "kl"])
def test_an_observer_takes_little_memory(name: str, ranks: RankPool) -> None:
    (above,) = ranks(1, observed, name)
    assert above < 1.5 * (64 << 20), above / 2**20


@pytest.mark.parametrize(
    ("per", "shape"), [("tensor", (1, 24)), ("channel", (4, 6)), ("token", (6, 4)), (2, (12, 2))]
)
def test_values_are_arranged_by_what_shares_a_scale(per, shape):
    x = torch.arange(24.0).view(2, 3, 4)
    rows = arranged(x, per)
    assert rows.shape == shape
    if per == "channel":
        assert rows[1].tolist() == x[..., 1].flatten().tolist()


@pytest.mark.parametrize("group", [32, "row", "tensor"])
def test_weights_with_mse_are_never_worse_than_with_extremes(group):
    made = torch.Generator().manual_seed(0)
    w = torch.randn(16, 64, generator=made)
    for zero_point in (False, True):
        grid = Grid("int4", group=group, zero_point=zero_point)

        def error(found, grid=grid):
            made = quantize(w, grid, scale=found[0], zero=found[1])
            return float((dequantize(*made, grid) - w).square().sum())

        assert error(weight_scale(w, grid, "mse")) < error(find_scale(w, grid))
        if group != 32:
            assert error(weight_scale(w, grid, "percentile")) < 2 * error(find_scale(w, grid))


@pytest.mark.parametrize("group", [64, "row", "tensor"])
@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8", "nf4"])
def test_mse_is_the_best_of_the_ranges_tried_on_every_grid(fmt: str, group: int | str) -> None:
    made = torch.Generator().manual_seed(0)
    normal = torch.randn(16, 192, generator=made)
    for w in (normal, normal**3):
        grid = Grid(fmt, group, scale_dtype="fp16")
        full = find_scale(w, grid)[0]

        def error(scale, w=w, grid=grid):
            return float((dequantize(*quantize(w, grid, scale=scale), grid) - w).square().sum())

        best = error(weight_scale(w, grid, "mse")[0])
        assert best <= min(error((full * share).half().float()) for share in (1.0, 0.8, 0.6))
        assert fmt != "nf4" or best < error(full)


def test_errors_count_with_their_importance():
    w = torch.tensor([[0.9, 0.33, -0.21, 0.47] * 8])
    grid = Grid("int4", group=32)
    importance = torch.tensor([1e-6, 1.0, 1.0, 1.0] * 8)
    plain, _ = weight_scale(w, grid, "mse")
    weighted, _ = weight_scale(w, grid, "mse", importance)
    assert float(weighted) < float(plain)


@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("shape", [(4, 27), (64, 64), (512, 128), (114, 576), (16, 4096)])
def test_rows_are_seen_together_so_that_short_ones_are_not_cut_by_noise(fmt, shape):
    made = torch.Generator().manual_seed(0)
    w = torch.randn(shape, generator=made) * torch.rand(shape[0], 1, generator=made)
    w[0] = 0
    grid = Grid(fmt, "row")

    def error(found):
        return float((dequantize(*quantize(w, grid, scale=found[0]), grid) - w).square().sum())

    most = error(find_scale(w, grid))
    for rule in ("kl", "percentile"):
        assert error(weight_scale(w, grid, rule)) < 1.01 * most
