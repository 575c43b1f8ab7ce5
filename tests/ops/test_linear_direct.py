"""Quantized products that go to their kernel past the dispatcher, and those that must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lezero.core.errors import ConfigError
from lezero.ops.linear import Packed, linear_int, native, pack, reference
from lezero.ops.native import Kernel

pytestmark = pytest.mark.skipif(not native.NATIVE.available(), reason="no kernel")
N, K = 20, 70


def weight(seed: int = 0) -> Packed:
    drawn = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (N, K), generator=drawn, dtype=torch.int8)
    return pack(codes, torch.rand(N, 1, generator=drawn), None, bits=8)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1))


W = weight()


def layer(x: Tensor, bias: Tensor | None = None, **more: Any) -> Tensor:
    return linear_int(x, W, bias, **{"out_features": N, "bits": 8, "x_bits": 8, **more})


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def watched(x: Tensor) -> Tensor:
    with Watch() as watch:
        found = layer(x)
    assert "lezero.linear_int.default" in watch.seen
    return found


class Own(Tensor):
    pass


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "a watcher": watched,
    "a gradient": lambda x: layer(x.clone().requires_grad_()).detach(),
    "a bias that trains": lambda x: layer(x, nn.Parameter(torch.zeros(N))).detach(),
    "vmap": torch.func.vmap(layer),
    "a subclass": lambda x: layer(x.as_subclass(Own)).as_subclass(Tensor),
    "a trace": lambda x: torch.jit.trace(layer, x, check_trace=False)(x),
    "a derivative": lambda x: torch.func.jvp(layer, (x,), (torch.ones_like(x),))[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_whoever_looks_on_gets_the_same(way: str) -> None:
    x = tokens(3)
    assert torch.equal(WAYS[way](x), layer(x))


def test_only_plain_calls_pass_the_dispatcher_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not seen of them is the Python step that the dispatcher would lead to."""
    steps: list[bool] = []
    check = "lezero.ops.linear.op._check_int"
    monkeypatch.setattr(check, lambda *given: steps.append(True))
    for plain in (lambda x: layer(x), torch.no_grad()(layer), torch.inference_mode()(layer)):
        plain(tokens(3))
    assert not steps
    for way in WAYS.values():
        way(tokens(3))
        assert steps
        steps.clear()


@pytest.mark.parametrize("bias", [torch.ones(1, N), torch.ones(N, 1), torch.ones(N).int()])
@pytest.mark.parametrize("trains", [False, True])
def test_a_bias_has_one_dim_and_is_of_floats(bias: Tensor, trains: bool) -> None:
    with pytest.raises(ConfigError, match="bias is"):
        layer(tokens(3).requires_grad_(trains), bias)


@pytest.mark.parametrize("scale", [torch.tensor(1), torch.tensor([1.0], dtype=torch.float64)])
def test_a_scale_may_be_of_any_type(scale: Tensor) -> None:
    x = tokens(3)
    assert torch.equal(layer(x, x_scale=scale), layer(x, x_scale=torch.tensor([1.0])))


@pytest.mark.parametrize("kernel", native.NATIVE.able(), ids=lambda kernel: kernel.name)
def test_a_tie_of_fp32_is_rounded_by_what_lies_below_it(kernel: Kernel) -> None:
    """3 · (1 + 2^-23) is a tie, and the sum of the block before it too small for fp64 to keep."""
    codes = torch.full((1, 64), 8, dtype=torch.uint8)
    codes[0, 0], codes[0, 32] = 7, 9
    weight = pack(codes, torch.tensor([[2.0**-60, 1 + 2.0**-23]]), None, bits=4)
    x, sizes = torch.zeros(1, 64), (1, 4, 32, 8, 0)
    x[0, 0], x[0, 32] = 1, 3
    one = torch.ones(1)
    for found in (
        native.NATIVE.load(kernel).linear_int(x, *weight, None, one, *sizes),
        reference.linear_int(x, weight, None, one, *sizes),
    ):
        assert float(found) == 3 + 2.0**-22
