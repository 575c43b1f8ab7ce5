"""The scales that SmoothQuant and AWQ multiply into channels are those of their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import Scheme, layer, scaling
from lezero.compress.quantize.inputs import as_known
from lezero.compress.quantize.methods import GPTQ
from tests.compress.method_conformance import inputs_of
from tests.compress.test_quantize import normed_blocks

Tried = list[tuple[Tensor, float]]


def scaled(gains: Tensor, scheme: Scheme, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By what the first layer's channels were divided; its inputs before, and its weight."""
    model = normed_blocks(64, gains)
    norm, layer = model[0]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        before, weight = norm(x), layer.weight.clone()
    lz.quantize_(model, scheme, data=x, objective="size")
    return gains / norm.weight.detach(), before, weight


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_smoothing_takes_equation_4(alpha: float) -> None:
    torch.manual_seed(0)
    scheme = lz.Int8WeightActivation(smooth=alpha, exact_above=None)
    s, x, weight = scaled(torch.rand(64) * 5 + 0.1, scheme, torch.randn(100, 64))
    wanted = x.abs().amax(0).pow(alpha) / weight.abs().amax(0).pow(1 - alpha)
    torch.testing.assert_close(s, wanted, rtol=1e-3, atol=1e-5)


def test_awq_takes_no_alpha() -> None:
    with pytest.raises(lz.ConfigError, match=r"smooth: got 0\.5, which method='awq' does not take"):
        lz.Int8WeightActivation(method="awq", smooth=0.5)
    for smooth in ("auto", None):
        assert lz.Int8WeightActivation(method="awq", smooth=smooth).method == "awq"


def test_awq_takes_powers_of_the_mean_size_of_the_inputs() -> None:
    torch.manual_seed(0)
    scheme = lz.Int4Weight(group=32, method="awq", scales="minmax")
    s, x, _ = scaled(torch.randn(64).exp(), scheme, torch.randn(200, 64) ** 3)
    powers = torch.stack([s, x.abs().mean(0)]).log()
    assert powers[0].std() > 0.01
    assert torch.corrcoef(powers)[0, 1] > 0.9999


def noted(monkeypatch: pytest.MonkeyPatch) -> Tried:
    """Scales that are tried, with their errors; those of the first layer come first."""
    found: Tried = []
    error = scaling._error

    def noting(*given: Any) -> float:
        found.append((given[-1].clone(), error(*given)))
        return found[-1][1]

    monkeypatch.setattr(scaling, "_error", noting)
    return found


def check_best(tried: Tried, candidates: list[Tensor], taken: Tensor) -> None:
    """Ones and then the candidates were tried for each of two layers, and the best was taken."""
    assert len(tried) == 2 * (1 + len(candidates))
    first = tried[: 1 + len(candidates)]
    for (s, _), wanted in zip(first, [torch.ones(64), *candidates], strict=True):
        torch.testing.assert_close(s, wanted, rtol=1e-4, atol=1e-6)
    best = min(range(len(first)), key=lambda at: first[at][1])
    assert 1 < best < len(candidates)  # not by accident: neither the first one nor the last
    torch.testing.assert_close(taken, first[best][0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_smoothing_by_itself_takes_the_best_of_six(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    tried, scheme = noted(monkeypatch), lz.Int8WeightActivation(exact_above=None)
    s, x, weight = scaled(torch.randn(64).exp(), scheme, torch.randn(100, 64))
    most_x, most_w = x.abs().amax(0), weight.abs().amax(0)
    alphas = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
    check_best(tried, [most_x**alpha / most_w ** (1 - alpha) for alpha in alphas], s)


@pytest.mark.parametrize("seed", [0, 1])
def test_awq_takes_the_best_of_twenty(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    tried, scheme = noted(monkeypatch), lz.Int4Weight(group=32, method="awq", scales="minmax")
    s, x, _ = scaled(torch.randn(64).exp(), scheme, torch.randn(200, 64) ** 3)
    powers = [x.abs().mean(0) ** (step / 20) for step in range(1, 21)]
    check_best(tried, [power / (power.max() * power.min()).sqrt() for power in powers], s)


def test_gptq_is_given_the_inputs_as_they_are_scaled() -> None:
    torch.manual_seed(0)
    gains, x = torch.randn(64).exp() * 3, torch.randn(300, 64) @ torch.randn(64, 64)
    model = normed_blocks(64, gains)
    norm, layer = model[0]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        before, weight = norm(x), layer.weight.clone()
        scheme = lz.Int8WeightActivation(smooth=0.5, method="gptq", exact_above=None)
        lz.quantize_(model, scheme, data=x, objective="size")
        weight *= gains / norm.weight
        found, after = layer.weight.unpacked().codes, norm(x)

    def apart(inputs: Tensor) -> float:
        wanted = GPTQ().codes(weight.clone(), layer.weight.grid, "minmax", inputs_of(inputs))
        return float((found != wanted.codes).float().mean())

    assert apart(after) < 0.01  # the order of sums rounds ties
    assert apart(before) > 0.1


class Feeds(nn.Module):
    """Blocks of two layers with a ReLU between them; the last inputs wake neurons that others do
    not."""

    def __init__(self, dim: int = 64, hidden: int = 256, asleep: int = 32) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
            for _ in range(2)
        ]
        self.blocks = nn.ModuleList(blocks)
        with torch.no_grad():
            first: Any = self.blocks[0][0]  # type: ignore[index]
            first.weight[:asleep] = 0
            first.weight[:asleep, -1] = torch.rand(asleep) * 0.5
            first.bias[:asleep] = -0.01

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "scheme",
    [
        lz.Int8WeightActivation(smooth=0.5, exact_above=None),
        lz.Int8WeightActivation(smooth=0.9, exact_above=None),
        lz.Int8WeightActivation(exact_above=None),
        lz.Int4Weight(group=32, method="awq"),
        lz.Int4Weight(group=32, method="gptq", scales="mse"),
    ],
    ids=["0.5", "0.9", "auto", "awq", "gptq"],
)
def test_what_calibration_never_met_is_not_lost(scheme: Scheme) -> None:
    torch.manual_seed(0)
    model = Feeds()
    asleep = torch.randn(512, 64)
    asleep[:, -1] = -1  # wakes none of them
    awake = asleep.clone()
    awake[:, -1] = 1
    with torch.no_grad():
        wanted = model(awake)
        plain = model.blocks[0][2].weight.clone()  # type: ignore[index]
    lz.quantize_(model, scheme, data=asleep, objective="size")
    with torch.no_grad():
        error = (model(awake) - wanted).norm() / wanted.norm()
    assert error < (0.02 if isinstance(scheme, lz.Int8WeightActivation) else 0.15)
    assert plain.isfinite().all()


def test_magnitudes_of_what_was_never_met_are_those_of_the_middle() -> None:
    size, most_w = torch.tensor([0.0, 2e-4, 0.5, 1.0, 3.0, 1e-9]), torch.ones(6)
    assert as_known(size, most_w).tolist() == pytest.approx([0.5, 0.5, 0.5, 1.0, 3.0, 0.5])
    square = as_known(size.square(), most_w, 2)
    assert square.tolist() == pytest.approx([0.25, 0.25, 0.25, 1.0, 9.0, 0.25])
    assert as_known(torch.zeros(3), most_w[:3]).tolist() == [0, 0, 0]
    most_w[1] = 5e3  # small by nature, since what it is multiplied with is large
    assert as_known(size, most_w)[1] == size[1]
    most_w[2] = 1e-9  # means little, but was met
    assert as_known(size, most_w)[2] == size[2]
    most_w[0] = 0
    assert as_known(size, most_w).isfinite().all()


@pytest.mark.parametrize(
    ("scheme", "most"),
    [
        (lz.Int8WeightActivation(smooth=0.5), 0.03),
        (lz.Int8WeightActivation(smooth=0.8, exact_above=None), 0.03),
        (lz.Int8WeightActivation(), 0.03),
        (lz.Int4Weight(group=32, method="awq"), 0.2),
    ],
    ids=["0.5", "0.8", "auto", "awq"],
)
def test_channels_that_are_small_by_nature_count(scheme: Scheme, most: float) -> None:
    torch.manual_seed(0)
    gains = torch.ones(64)
    gains[:8] = 1e-4
    model, x = normed_blocks(64, gains), torch.randn(256, 64)
    with torch.no_grad():
        for block in model:
            block[1].weight[:, :8] *= 1e4  # type: ignore[index]
        wanted = model(x)
    lz.quantize_(model, scheme, data=x, objective="size")
    with torch.no_grad():
        assert (model(x) - wanted).norm() / wanted.norm() < most


@pytest.mark.parametrize("method", ["nearest", "gptq"])
def test_rows_are_rounded_alike_however_many_at_a_time(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    gains = torch.ones(64)
    gains[::16] = 1e-4
    x = torch.randn(256, 64) * gains
    weight = torch.randn(64, 64) * 0.1
    weight[32:, ::16] = 2000.0
    codes = []
    for rows in (8, 64):
        monkeypatch.setattr(layer, "at_once", lambda _, rows=rows: 64 * rows)
        monkeypatch.setattr(layer, "_AT_ONCE_WITH_HESSIAN", 64 * rows)
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        model[0].weight.data = weight.clone()
        scheme = lz.Int4Weight(group=32, method=method, scales="mse")
        lz.quantize_(model, scheme, data=x, objective="size")
        codes.append(model[0].weight.unpacked()[0])
    assert torch.equal(*codes)
