"""Block-wise quantization: what codes mean, how far values move, what stays visible."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lezero.core.errors import ConfigError
from lezero.ops.quantize import (
    FORMATS,
    Grid,
    dequantize,
    find_scale,
    fixed_point,
    nearest_points,
    pack_nibbles,
    quantize,
    quantize_tokens,
    unpack_nibbles,
)
from lezero.ops.quantize.grid import LEVELS, NF4

INTEGERS = [
    Grid(format, group, zero_point)  # type: ignore[arg-type]
    for format in ("int8", "int4")
    for group in ("row", "tensor", 32, 7)
    for zero_point in (False, True)
]


@pytest.mark.parametrize("grid", INTEGERS, ids=str)
def test_no_value_moves_by_more_than_half_a_step(grid: Grid) -> None:
    x = torch.randn(5, 75, generator=torch.Generator().manual_seed(0)) + 0.3
    found = quantize(x, grid)
    assert found.codes.shape == x.shape
    assert found.codes.dtype == grid.code_dtype
    assert tuple(found.scale.shape) == grid.scale_shape(x.shape)
    low, high = grid.code_range
    assert found.codes.min() >= low
    assert found.codes.max() <= high
    step = found.scale
    if isinstance(grid.group, int):
        step = step.repeat_interleave(grid.group, -1)[:, :75]
    # With a zero point rounded to a whole number, the ends may lie half a step outside.
    limit = 1.001 if grid.zero_point else 0.5001
    assert ((dequantize(*found, grid) - x).abs() <= limit * step).all()


def test_symmetric_codes_are_rounded_once() -> None:
    x = torch.tensor([[7, 0.5, 1.4999999, -0.49999997]])
    grid = Grid("int4", 4)
    assert dequantize(*quantize(x, grid), grid).tolist() == [[7, 0, 1, 0]]


@pytest.mark.parametrize("grid", [*INTEGERS, Grid("fp8", 32), Grid("nf4", 32)], ids=str)
def test_nearest_points_are_what_codes_decode_to(grid: Grid) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(4))
    whole = torch.arange(-8, 8).repeat(6) + 0.5  # halves, and what is next to them
    x = torch.cat([x, whole[None], torch.nextafter(whole, torch.zeros(96))[None], x[:1] * 1e30])
    x[0, :32] = -x[0, :32].abs()
    x[1, :32] = x[1, :32].abs()  # a zero point of 0
    scale, zero = find_scale(x, grid)
    for s in (scale, torch.ones_like(scale)):
        wanted = dequantize(*quantize(x, grid, scale=s, zero=zero), grid)
        found = nearest_points(x, grid, s, zero)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("format", FORMATS)
def test_scales_that_fp16_does_not_hold(format: str) -> None:
    """See [Note: scales that are not held]."""
    grid = Grid(format, 4, scale_dtype="fp16")  # type: ignore[arg-type]
    for size, found in ((65520, math.nan), (65504, None), (2.0**-25, 0.0), (2.0**-24, None)):
        x = torch.full((1, 4), size * LEVELS[format])
        wanted = x if found is None else torch.full((1, 4), found)
        assert torch.equal(
            dequantize(*quantize(x, grid), grid).nan_to_num(-1), wanted.nan_to_num(-1)
        )


@pytest.mark.filterwarnings("error")
def test_nf4_of_a_transposed_matrix_warns_of_nothing() -> None:
    x, grid = torch.randn(64, 32), Grid("nf4", 32)
    found = quantize(x.T, grid)
    assert torch.equal(found.codes, quantize(x.T.contiguous(), grid).codes)


@pytest.mark.parametrize("format", FORMATS)
def test_what_lies_on_the_grid_stays(format: str) -> None:
    grid = Grid(format, 64, scale_dtype="bf16")  # type: ignore[arg-type]
    x = torch.randn(3, 130, generator=torch.Generator().manual_seed(1))
    once = dequantize(*quantize(x, grid), grid)
    scale = quantize(x, grid).scale
    again = dequantize(*quantize(once, grid, scale=scale), grid)
    assert torch.equal(once, again)
    assert torch.equal(scale.bfloat16().float(), scale)
    worst = {"int8": 0.02, "int4": 0.3, "fp8": 0.15, "nf4": 0.5}[format]
    assert (once - x).abs().max() < worst


def test_nf4_has_the_values_of_its_paper() -> None:
    """Dettmers et al., "QLoRA" (2023), arXiv:2305.14314, appendix E."""
    values = [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
    codes, grid = torch.arange(16, dtype=torch.uint8), Grid("nf4", "tensor")
    found = dequantize(codes, torch.ones(1), None, grid)
    assert torch.equal(found, torch.tensor(values, dtype=torch.float32))
    assert torch.equal(quantize(found, grid).codes, codes)


def test_nf4_takes_the_nearest_of_its_values() -> None:
    x = torch.linspace(-1, 1, 999)
    table = torch.tensor(NF4)
    nearest = (x[:, None] - table).abs().argmin(1)
    assert torch.equal(quantize(x, Grid("nf4", "tensor")).codes.long(), nearest)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_with_what_is_not_finite_decodes_to_nan(format: str, bad: float) -> None:
    grid = Grid(format, 32)  # type: ignore[arg-type]
    x = torch.ones(2, 70)
    x[1, 40] = bad
    found = dequantize(*quantize(x, grid), grid)
    assert found[1, 32:64].isnan().all()
    assert (found.isnan().sum(), found[0].eq(1).all()) == (32, True)


@pytest.mark.parametrize("grid", [*INTEGERS, Grid("fp8", 32), Grid("nf4", 32)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e38])
def test_extreme_magnitudes(grid: Grid, scale: float) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).clamp(-3, 3) * scale
    found = dequantize(*quantize(x, grid), grid)
    assert found.isfinite().all()
    assert (found - x).abs().max() <= max(0.6 * scale, 1e-36)


def test_given_scales_count_and_must_fit() -> None:
    x = torch.tensor([[1.0, 2.0, 100.0]])
    grid = Grid("int8")
    found = quantize(x, grid, scale=torch.tensor([[0.5]]))
    assert found.codes.tolist() == [[2, 4, 127]]
    with pytest.raises(ConfigError, match=r"\(1, 1\)"):
        quantize(x, grid, scale=torch.ones(3))
    with pytest.raises(ConfigError, match="exactly where"):
        quantize(x, grid, scale=torch.ones(1, 1), zero=torch.zeros(1, 1))
    fraction = quantize(
        x, Grid("int4", zero_point=True), scale=torch.ones(1, 1), zero=torch.full((1, 1), 2.5)
    )
    assert dequantize(*fraction, Grid("int4", zero_point=True))[0, :2].sub(x[0, :2]).abs().max() < 1


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    for grid in (*INTEGERS, Grid("nf4")):
        found = quantize(torch.empty(shape), grid)
        assert dequantize(*found, grid).shape == shape


def test_strided_and_half_inputs() -> None:
    x = torch.randn(6, 40).bfloat16()
    one, other = (
        quantize(x[::2].T, Grid("int8")),
        quantize(x[::2].T.contiguous().float(), Grid("int8")),
    )
    assert torch.equal(one.codes, other.codes)


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "int3"},
        {"format": "int8", "group": 0},
        {"format": "int8", "group": "channel"},
        {"format": "nf4", "zero_point": True},
        {"format": "int8", "scale_dtype": "fp64"},
    ],
)
def test_an_unknown_grid_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Grid(**fields)  # type: ignore[arg-type]


def test_what_is_no_float_is_refused() -> None:
    with pytest.raises(ConfigError, match="floats"):
        quantize(torch.zeros(3, dtype=torch.int32), Grid("int8"))


@given(
    st.lists(st.lists(st.integers(0, 15), min_size=5, max_size=5), min_size=1), st.integers(0, 5)
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_nibbles_come_back(rows: list[list[int]], count: int) -> None:
    codes = torch.tensor(rows, dtype=torch.uint8)[:, :count]
    packed = pack_nibbles(codes)
    assert packed.shape[-1] == -(-count // 2)
    assert torch.equal(unpack_nibbles(packed, count), codes)


def test_the_first_code_lies_in_the_low_half() -> None:
    assert pack_nibbles(torch.tensor([1, 2, 3], dtype=torch.uint8)).tolist() == [0x21, 0x03]
    with pytest.raises(ConfigError, match="uint8"):
        pack_nibbles(torch.zeros(3))
    with pytest.raises(ConfigError, match="for 5 codes"):
        unpack_nibbles(torch.zeros(2, dtype=torch.uint8), 5)


def test_tokens_have_their_own_scale() -> None:
    x = torch.tensor([[1.0, -127.0], [0.5, 0.25], [math.nan, 1.0], [0.0, 0.0]])
    codes, scale = quantize_tokens(x)
    assert codes.tolist() == [[1, -127], [127, 64], [0, 0], [0, 0]]
    torch.testing.assert_close(
        scale, torch.tensor([1.0, 0.5 / 127, math.nan, 0.0]), equal_nan=True, rtol=0, atol=0
    )
    codes, scale = quantize_tokens(x, torch.tensor([0.5]))
    assert codes.tolist() == [[2, -127], [1, 0], [0, 0], [0, 0]]
    assert scale.isnan().tolist() == [False, False, True, False]


def test_sixteen_bits_keep_what_bf16_would_lose() -> None:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(3))
    codes, scale = fixed_point(x, 64)
    assert (codes.shape, scale.shape) == ((4, 256), (4, 4))
    found = (codes.unflatten(1, (4, 64)).float() * scale[..., None]).flatten(1)[:, :200]
    assert (found - x).abs().max() < (x.bfloat16().float() - x).abs().max() / 50
