"""Fitting groups to their grid: kernels against the reference, and what they promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.grid_fit import half_quadratic, least_error, reference
from lezero.ops.grid_fit.native import NATIVE
from lezero.ops.quantize import Grid, dequantize, find_scale, quantize

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHAPES = [(300, 64), (200, 32), (150, 17), (80, 5), (40, 1), (9, 1000), (0, 64)]


def weights(G: int, E: int, kind: str = "normal") -> Tensor:
    draw = torch.Generator().manual_seed(1000 * G + E)
    w = torch.randn(G, E, generator=draw) * 0.05
    if kind == "outliers":  # errors beyond what β takes for nearly right
        w = torch.where(torch.rand(G, E, generator=draw) < 0.05, 40 * w, w)
    return w * torch.rand(G, 1, generator=draw) * (20 if kind == "outliers" else 1)


def fitted(w: Tensor, bits: str, zero: bool, kept: torch.dtype) -> tuple[Grid, Tensor, Tensor]:
    grid = Grid(bits, group="row", zero_point=zero, scale_dtype=NAMES[kept])
    scale, zeros = find_scale(w, grid)
    return grid, scale.flatten(), None if zeros is None else zeros.flatten()


@pytest.fixture(params=NATIVE.able(), ids=lambda kernel: kernel.name)
def ops(request):
    return NATIVE.load(request.param)


def test_scales_of_any_size_are_numbers_of_fp16(ops):
    aim = 2 ** torch.linspace(-26, 15, 500)
    w = aim[:, None] * torch.arange(-8.0, 8.0)
    full = (1.6 * aim).half().float()
    wanted = reference.least_error(w, full, None, (-8, 7), torch.float16, 20)
    found = full.clone()
    ops.least_error(w, found, None, -8, 7, KINDS[torch.float16], 20)
    assert torch.equal(found, found.half().float())
    assert (found < full).double().mean() > 0.9
    assert (found == wanted).double().mean() > 0.97


@pytest.mark.parametrize("kept", KINDS, ids=NAMES.get)
@pytest.mark.parametrize(("bits", "zero"), [("int4", True), ("int4", False), ("int8", True)])
@pytest.mark.parametrize(("G", "E"), SHAPES)
def test_scales_have_as_little_error_as_the_reference(ops, G, E, bits, zero, kept):
    w = weights(G, E)
    grid, scale, zeros = fitted(w, bits, zero, kept)
    codes = tuple(code - grid.middle for code in grid.code_range)
    wanted = reference.least_error(w, scale, zeros, codes, kept, 20)
    found = scale.clone()
    ops.least_error(w, found, zeros, *codes, KINDS[kept], 20)

    def error(scale: Tensor) -> Tensor:
        z = None if zeros is None else zeros[:, None]
        points = dequantize(*quantize(w, grid, scale=scale[:, None], zero=z), grid)
        return (points - w).double().square().sum(1)

    # Sums in another order may take one of two scales that are as good.
    assert torch.all(error(found) <= error(wanted) * (1 + 1e-5) + 1e-12)
    assert (found == wanted).double().mean() > 0.97 or not G
    assert torch.equal(found, found.to(kept).float())


@pytest.mark.parametrize("kept", KINDS, ids=NAMES.get)
@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize(("G", "E"), SHAPES)
def test_zero_points_are_as_good_as_the_reference_s(ops, G, E, kind, kept):
    w = weights(G, E, kind)
    grid, scale, zeros = fitted(w, "int4", True, kept)
    wanted = reference.half_quadratic(w, scale, zeros, (0, 15), kept, 20)
    zero, codes = zeros.clone(), torch.empty(G, E, dtype=torch.uint8)
    ops.half_quadratic(w, scale, zero, codes, 0, 15, KINDS[kept], 20)

    def error(zero: Tensor) -> Tensor:
        q = quantize(w, grid, scale=scale[:, None], zero=zero[:, None])
        return (dequantize(*q, grid) - w).double().abs().mean(1)

    exact = quantize(w, grid, scale=scale[:, None], zero=zero[:, None])
    assert torch.equal(codes, exact.codes)
    assert torch.equal(zero, zero.to(kept).float())
    assert torch.all(error(zero) <= error(zeros) * (1 + 1e-6))
    if G:  # a group whose error hardly falls may stop a turn sooner or later
        one, other = error(zero).mean(), error(wanted[1]).mean()
        assert float(one) == pytest.approx(float(other), rel=2e-3, abs=1e-9)
        assert torch.isclose(zero, wanted[1], atol=0.02).double().mean() > 0.9


def test_outliers_take_the_slow_way():
    w = weights(300, 64, "outliers")
    _, scale, zeros = fitted(w, "int4", True, torch.float16)
    codes = (w / scale[:, None] + zeros[:, None]).round().clamp(0, 15)
    wrong = (w - (codes - zeros[:, None]) * scale[:, None]).abs()
    assert (wrong.amax(1) > 0.17).double().mean() > 0.3  # 10^(1 / (0.7 - 2))


def test_a_group_that_is_not_finite_keeps_its_scale_and_harms_no_other(ops):
    w = weights(6, 64)
    clean = w.clone()
    w[1, 3], w[4, 60], w[2] = torch.nan, torch.inf, 0
    _, scale, zeros = fitted(w, "int4", True, torch.float16)
    found, zero, codes = scale.clone(), zeros.clone(), torch.empty(6, 64, dtype=torch.uint8)
    ops.least_error(w, found, zeros, 0, 15, 2, 20)
    ops.half_quadratic(w, found, zero, codes, 0, 15, 2, 20)
    assert found.isnan().tolist() == [False, True, False, False, True, False]
    assert found[2] == 0
    assert codes.amax() <= 15
    assert torch.isfinite(zero).all()
    _, scale, zeros = fitted(clean, "int4", True, torch.float16)
    alone = [x[[0, 3, 5]] for x in (clean, scale, zeros)]
    kept = [0, 3, 5]
    best = least_error(*alone, code_range=(0, 15), kept=torch.float16, steps=20)
    assert torch.equal(found[kept], best)
    given = (alone[0], best, alone[2])
    fit = half_quadratic(*given, code_range=(0, 15), kept=torch.float16, rounds=20)
    assert torch.equal(codes[kept], fit[0])
    assert torch.equal(zero[kept], fit[1])


def test_turns_end_alike_whether_looked_for_or_not():
    w = weights(60, 64)
    w[7] = 0
    _, scale, zeros = fitted(w, "int4", True, torch.float16)
    given = (w, scale, zeros, (0, 15), torch.float16, 20)
    for looked, other in zip(
        reference.half_quadratic(*given), reference.half_quadratic(*given, look=False), strict=True
    ):
        assert torch.equal(looked, other)


def test_importance_weighs_the_error():
    w = weights(50, 64)
    _, scale, zeros = fitted(w, "int4", True, torch.float32)
    heavy = torch.ones_like(w)
    heavy[:, 0] = 1e6
    how = {"code_range": (0, 15), "kept": torch.float32, "steps": 20}
    found = least_error(w, scale, zeros, **how, importance_GE=heavy)

    def wrong(scale: Tensor) -> Tensor:
        codes = (w[:, 0] / scale + zeros).round().clamp(0, 15)
        return ((codes - zeros) * scale - w[:, 0]).abs()

    assert wrong(found).mean() < 0.5 * wrong(least_error(w, scale, zeros, **how)).mean()


@pytest.mark.parametrize(
    ("w", "scale", "kept", "named"),
    [
        (torch.zeros(4, 8).double(), torch.ones(4), torch.float16, "weights of torch.float64"),
        (torch.zeros(4, 0), torch.ones(4), torch.float16, r"\(4, 0\)"),
        (torch.zeros(4, 8), torch.ones(3), torch.float16, r"scale is torch.float32 \(3,\)"),
        (torch.zeros(4, 8), torch.ones(4), torch.float64, "kept is torch.float64"),
    ],
)
def test_wrong_arguments_are_named(w, scale, kept, named):
    with pytest.raises(ConfigError, match=named):
        least_error(w, scale, None, code_range=(0, 15), kept=kept, steps=20)
