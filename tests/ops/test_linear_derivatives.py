"""Derivatives of quantized layers in every mode of torch: those of the layers with their weights
decoded, and never zeros."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import lezero as lz
from lezero.ops.linear import linear_bf16, pack_bf16, unpack_bf16


def derivatives(model: nn.Module, x: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Of outputs that are linear in inputs and bias, so that rounding the inputs changes none."""

    def squares(z: Tensor) -> Tensor:
        return model(z).square().sum()

    def of_bias(bias: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, {"0.bias": bias}, (x,))
        return found

    bias = model.get_parameter("0.bias").detach()
    wanted = x.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(model(forward_ad.make_dual(x, v))).tangent
        (grad,) = torch.autograd.grad(squares(forward_ad.make_dual(wanted, v)), wanted)
        mixed = forward_ad.unpack_dual(grad).tangent
    return {
        "jvp": torch.func.jvp(model, (x,), (v,))[1],
        "jvp of the bias": torch.func.jvp(of_bias, (bias,), (torch.ones_like(bias),))[1],
        "dual": dual,
        "forward over reverse": mixed,
        "jacfwd": torch.func.jacfwd(model)(x),
        "jacrev": torch.func.jacrev(model)(x),
        "hessian": torch.func.hessian(squares)(x),
        "grad": torch.func.grad(lambda z: model(z).sum())(x),
        "grad of grad": torch.func.grad(lambda z: torch.func.grad(squares)(z).sum())(x),
        "vmap": torch.vmap(torch.func.grad(lambda z: model(z).sum()))(torch.stack([x, v])),
        "compiled": compiled(lambda a, b: torch.func.jvp(model, (a,), (b,))[1])(x, v),
    }


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch.compiler.reset()  # each model is another, of one code
    return torch.compile(function, backend="aot_eager", fullgraph=True)


SCHEMES: dict[str, Any] = {
    "int8": lz.Int8Weight(),
    "int4": lz.Int4Weight(group=32),
    "int8 × int8": lz.Int8WeightActivation(smooth=None),
    "fp8 × fp8": lz.Fp8(activations="token"),
}


def same(made: nn.Module, x: Tensor) -> None:
    plain, v = lz.dequantize_(copy.deepcopy(made)), torch.randn_like(x)
    assert torch.equal(torch.func.jvp(made, (x,), (v,))[0], made(x))
    wanted = derivatives(plain, x, v)
    for name, found in derivatives(made, x, v).items():
        assert wanted[name].any()
        torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", SCHEMES)
def test_of_linear_layers(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(3, 32)
    same(lz.quantize_(model, SCHEMES[name], data=x, objective="size"), x)


@pytest.mark.parametrize("dims", [1, 2])
def test_of_convolutions(dims: int) -> None:
    torch.manual_seed(0)
    layer = (nn.Conv1d, nn.Conv2d)[dims - 1](4, 6, 3, stride=2, padding=1, groups=2)
    model, x = nn.Sequential(layer), torch.randn(2, 4, *[5] * dims)
    same(lz.quantize_(model, lz.Int8WeightActivation(), data=x, objective="size"), x)


def test_of_packed_bf16() -> None:
    torch.manual_seed(0)
    weight, x, v = pack_bf16(torch.randn(20, 70)), torch.randn(3, 70), torch.randn(3, 70)
    found = torch.func.jvp(lambda z: linear_bf16(z, weight, out_features=20), (x,), (v,))[1]
    torch.testing.assert_close(found, v @ unpack_bf16(weight, 20, 70).float().T)


def test_what_is_not_finite_stays_so() -> None:
    torch.manual_seed(0)
    model = lz.quantize_(nn.Sequential(nn.Linear(32, 16)), lz.Int8Weight(), objective="size")
    x = torch.randn(3, 32)
    x[1, 5] = torch.inf
    found = torch.func.jvp(model, (x,), (x,))[0]
    torch.testing.assert_close(found, model(x), rtol=0, atol=0, equal_nan=True)
