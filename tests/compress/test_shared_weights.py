"""A weight that several linear layers share is fitted to what comes through all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.core.errors import OrderError


class Two(nn.Module):
    """Two layers with one weight, or one layer called twice."""

    def __init__(self, *, layers: int) -> None:
        super().__init__()
        self.a = nn.Linear(256, 256, bias=False)
        self.b = self.a if layers == 1 else nn.Linear(256, 256, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(z)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two(layers=2) for _ in range(3))

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, z = layer(x, z)
        return x, z


def errors(make: Callable[[], nn.Module], method: str) -> list[float]:
    torch.manual_seed(0)
    x, z = (
        torch.randn(1024, 256) @ (torch.randn(256, 256) * torch.logspace(0, -3, 256)[:, None])
        for _ in range(2)
    )
    model = make().eval()
    with torch.no_grad():
        before = model(x, z)
        scheme = lz.Int4Weight(group=32, method=method)
        lz.quantize_(model, scheme, data=[(x, z)], objective="size")
        return [float((a - b).norm() / b.norm()) for a, b in zip(model(x, z), before, strict=True)]


@pytest.mark.parametrize("make", [functools.partial(Two, layers=2), Blocks])
def test_gptq_is_better_than_nearest_in_every_layer(make: Callable[[], nn.Module]) -> None:
    fitted, nearest = errors(make, "gptq"), errors(make, "nearest")
    assert all(a < 0.8 * b for a, b in zip(fitted, nearest, strict=True))


def test_two_layers_are_as_one_that_is_called_twice() -> None:
    two, one = (errors(functools.partial(Two, layers=n), "gptq") for n in (2, 1))
    assert two == pytest.approx(one, rel=1e-3)


def test_what_the_first_fsdp_holds_is_told() -> None:
    class FullyShardedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

    FullyShardedDataParallel.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    model = nn.Sequential(nn.Linear(64, 64), FullyShardedDataParallel())
    with pytest.raises(OrderError, match=r"'1' is wrapped by FullyShardedDataParallel.* quantize"):
        lz.quantize_(model, lz.Int8Weight(), objective="size")
