"""int8 convolution: oneDNN's result is the formula's, and weights are packed once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.linear import conv, conv_int8
from lezero.ops.quantize import Grid, quantize
from tests.ranks import RankPool

CASES = [
    ((2, 8, 10, 9), (16, 8, 3, 3), {"padding": (1, 1)}),
    ((1, 3, 17, 17), (7, 3, 5, 5), {"stride": (2, 2), "padding": (2, 1)}),
    ((2, 8, 9, 9), (8, 1, 3, 3), {"groups": 8, "dilation": (2, 2)}),
    ((3, 6, 5, 5), (9, 6, 1, 1), {}),
    ((2, 6, 20), (8, 3, 3), {"groups": 2, "stride": (1,), "padding": (1,), "dilation": (1,)}),
]


# What oneDNN gives garbage for, or ends the process.
ODD = [
    ((8, 1, 15, 15), (3, 1, 2, 2), {"padding": (2, 2)}),
    ((2, 1, 28, 28), (8, 1, 5, 5), {"padding": (2, 2)}),
    ((5, 1, 28, 3), (1, 1, 1, 5), {"padding": (2, 1), "stride": (1, 3), "dilation": (2, 1)}),
    ((1, 1, 15, 2), (16, 1, 2, 2), {"stride": (1, 2)}),
    ((2, 8, 8), (264, 1, 2), {"padding": (1,), "stride": (1,), "dilation": (1,), "groups": 8}),
    ((2, 2, 28, 28), (16, 1, 3, 3), {"padding": (3, 3), "groups": 2}),
    ((2, 4, 9, 7), (6, 4, 3, 3), {"padding": (2, 1), "dilation": (2, 2)}),
    ((1, 16, 2, 1), (8, 16, 4, 1), {"padding": (2, 2), "stride": (1, 3), "dilation": (1, 2)}),
    ((5, 48, 2), (48, 1, 2), {"padding": (4,), "stride": (3,), "dilation": (3,), "groups": 48}),
    ((1, 64, 1), (8, 8, 1), {"padding": (3,), "stride": (2,), "dilation": (2,), "groups": 8}),
    (
        (1, 64, 15, 2),
        (16, 4, 5, 2),
        {"padding": (1, 1), "stride": (3, 1), "dilation": (1, 3), "groups": 16},
    ),
]


def layer(x_shape: tuple[int, ...], w_shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(w_shape, generator=generator)
    codes, scale, _ = quantize(weight.flatten(1), Grid("int8"))
    return {
        "x": torch.randn(x_shape, generator=generator).to(dtype),
        "weight": codes.view(w_shape),
        "scale": scale[:, 0],
        "bias": torch.randn(w_shape[0], generator=generator),
        "x_scale": torch.tensor([0.03]),
        "x_zero": torch.tensor([110]),
    }


def formula(given: dict[str, Any], options: dict[str, Any]) -> Tensor:
    dims = given["weight"].dim() - 2
    defaults = {"stride": 1, "padding": 0, "dilation": 1}
    places = [list(options.get(name, [value] * dims)) for name, value in defaults.items()]
    return conv.reference(*given.values(), *places, options.get("groups", 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("x_shape", "w_shape", "options"), CASES + ODD)
def test_equals_the_formula(x_shape: Any, w_shape: Any, options: Any, dtype: torch.dtype) -> None:
    given = layer(x_shape, w_shape, dtype)
    found, wanted = conv_int8(**given, **options), formula(given, options)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, wanted, rtol=near, atol=10 * near)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_only_a_sample_that_is_not_finite_becomes_nan(bad: float) -> None:
    given = layer((3, 4, 6, 6), (5, 4, 3, 3), torch.float32)
    given["x"][1, 2, 3, 3] = bad
    found = conv_int8(**given)
    assert found[1].isnan().all()
    assert found[0].isfinite().all()
    torch.testing.assert_close(found, formula(given, {}), equal_nan=True, rtol=1e-5, atol=1e-4)


def held_back() -> Tensor:
    """In a process whose oneDNN adds pairs in 16 bits: each product is the largest there is."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    weight = torch.full((4, 8, 3, 3), 127, dtype=torch.int8)
    scales = {"x_scale": torch.tensor([1 / 255]), "x_zero": torch.tensor([0])}
    return conv_int8(torch.ones(1, 8, 3, 3), weight, torch.ones(4), **scales)


def test_a_processor_that_is_held_back_gives_the_same(ranks: RankPool) -> None:
    (found,) = ranks(1, held_back)
    torch.testing.assert_close(found, torch.full((1, 4, 1, 1), 8.0 * 9 * 127))


def test_weights_are_packed_again_when_they_change() -> None:
    given = layer((1, 4, 6, 6), (5, 4, 3, 3), torch.float32)
    first = conv_int8(**given)
    given["weight"].mul_(-1)
    given["bias"].mul_(-1)
    torch.testing.assert_close(conv_int8(**given), -first)


def test_tensors_of_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        given = layer((1, 4, 6, 6), (5, 4, 3, 3), torch.float32)
        found = [conv_int8(**given) for _ in range(2)]
    wanted = conv_int8(**layer((1, 4, 6, 6), (5, 4, 3, 3), torch.float32))
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("x_shape", "w_shape", "options"), CASES)
def test_gradients_are_those_of_the_dequantized_weight(
    x_shape: Any, w_shape: Any, options: Any, dtype: torch.dtype
) -> None:
    given = layer(x_shape, w_shape, dtype)
    x, bias = given["x"].requires_grad_(), given["bias"].requires_grad_()
    out = conv_int8(**given, **options)
    out.float().square().sum().backward()
    convolve = torch.nn.functional.conv1d if x.dim() == 3 else torch.nn.functional.conv2d
    wide = given["weight"] * given["scale"].view(-1, *[1] * (x.dim() - 1))
    twin = x.detach().float().requires_grad_()
    convolve(twin, wide, **options).backward(2 * out.detach().float())
    near = 1e-4 if dtype == torch.float32 else 2e-2
    assert x.grad is not None
    assert twin.grad is not None
    torch.testing.assert_close(x.grad.float(), twin.grad, rtol=near, atol=near * 100)
    places = [0, *range(2, out.dim())]
    torch.testing.assert_close(bias.grad, 2 * out.detach().float().sum(places), rtol=near, atol=0.1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "a part of contiguous": lambda x: x[:, :, 1:, 1:],
    "a part of channels last": lambda x: x.contiguous(memory_format=torch.channels_last)[..., 1:],
    "transposed": lambda x: x.transpose(2, 3),
    "one channel, many times": lambda x: x[:, :1].expand(-1, 4, -1, -1),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_lie_as_torchs_do(name: str, bad: bool, last: bool) -> None:
    given = layer((2, 4, 7, 6), (5, 4, 3, 3), torch.float32)
    given["x"][0, 0, 3, 3] = math.nan if bad else 0
    given["x"] = LAYOUTS[name](given["x"])
    plain = conv_int8(**given)
    layout = torch.channels_last if last else torch.contiguous_format
    weight = given["weight"].float().contiguous(memory_format=layout)
    wanted = torch.nn.functional.conv2d(given["x"], weight)
    found = conv_int8(**given, channels_last=last)
    assert found.stride() == wanted.stride()
    assert torch.equal(found.nan_to_num(), plain.nan_to_num())


def test_images_that_lie_either_way_give_contiguous_outputs() -> None:
    for x_shape, options in (((2, 1, 6, 6), {}), ((2, 4, 1, 1), {"padding": (1, 1)})):
        given = layer(x_shape, (5, x_shape[1], 2, 2), torch.float32)
        for x in (given["x"], given["x"].contiguous(memory_format=torch.channels_last)):
            found = conv_int8(**{**given, "x": x}, **options)
            assert found.is_contiguous()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_knows_the_op(name: str, last: bool) -> None:
    given = layer((2, 4, 7, 6), (5, 4, 3, 3), torch.float32)
    given["x"] = LAYOUTS[name](given["x"]).detach()
    given["x"].requires_grad_()
    given["bias"].requires_grad_()
    rest = ([1, 1], [0, 0], [1, 1], 1, last)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    op = torch.ops.lezero.conv_int8.default
    torch.library.opcheck(op, (*given.values(), *rest), test_utils=tests)


def test_empty_batches_and_wrong_shapes() -> None:
    given = layer((2, 4, 6, 6), (5, 4, 3, 3), torch.float32)
    assert conv_int8(**{**given, "x": given["x"][:0]}).shape == (0, 5, 4, 4)
    for name, wrong in (("x", given["x"][:, :3]), ("scale", given["scale"][:3])):
        with pytest.raises(ConfigError, match="conv_int8"):
            conv_int8(**{**given, name: wrong})
    with pytest.raises(ConfigError, match="groups that divide O"):
        conv_int8(**layer((2, 8, 6, 6), (5, 4, 3, 3), torch.float32), groups=2)


def test_an_input_that_is_smaller_than_the_kernel_is_refused() -> None:
    for x_shape, w_shape, options in (
        ((1, 8, 8, 8), (16, 8, 16, 16), {"stride": (16, 16)}),
        ((1, 8, 7), (16, 8, 10), {"stride": (5,), "padding": (0,), "dilation": (1,)}),
        ((1, 8, 4, 2), (4, 8, 3, 3), {"stride": (4, 4)}),
    ):
        with pytest.raises(ConfigError, match="smaller than the kernel"):
            conv_int8(**layer(x_shape, w_shape, torch.float32), **options)


@pytest.mark.parametrize(
    "options",
    [{"stride": (0, 1)}, {"dilation": (1, -1)}, {"padding": (-1, 0)}, {"groups": 0}],
    ids=str,
)
def test_places_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a number a dim from 1, of padding from 0"):
        conv_int8(**layer((1, 4, 6, 6), (5, 4, 3, 3), torch.float32), **options)


def test_sums_that_32_bits_do_not_hold_run_by_the_formula() -> None:
    weight = torch.full((2, 1 << 15, 3), 127, dtype=torch.int8)
    places: Any = {
        name: (0 if name == "padding" else 1,) for name in ("stride", "padding", "dilation")
    }
    x, one, zero = torch.full((1, 1 << 15, 3), 255.0), torch.ones(()), torch.zeros(())
    found = conv_int8(x, weight, torch.ones(2), x_scale=one, x_zero=zero, **places)
    torch.testing.assert_close(found, torch.full((1, 2, 1), 255.0 * 127 * 3 * (1 << 15)))
