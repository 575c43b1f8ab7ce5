"""Objects that blocks are given or give back are looked into, and named where written to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.replay import Replay
from lezero.compress.quantize.spill import Spill
from lezero.nn.blocks import blocks

AWQ = lz.Int4Weight(group=32, method="awq", scales="minmax")


@dataclass(frozen=True)
class Tables:
    """What a model makes once for all its blocks."""

    shift: Tensor
    factor: float = 2.0

    def times(self, x: Tensor) -> Tensor:
        return x * self.factor


@dataclass
class Notes:
    """What blocks may write to."""

    shift: Tensor
    depth: int = 0


@dataclass
class Given:
    """What a block gives."""

    x: Tensor


class Plain:
    """An object of which nothing is known."""

    shift = 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(64), nn.Linear(64, 64)
        self.norm.weight.data.normal_().exp_()

    def forward(self, x: Tensor | Given, more: Any, writes: bool, gives: bool) -> Any:
        x = x.x if isinstance(x, Given) else x
        shift = more(x) if callable(more) else getattr(more, "shift", more)
        if writes:
            more.depth += 1
        x = x + torch.tanh(self.inner(self.norm(x))) + torch.as_tensor(shift)
        return Given(x) if gives else x


class Model(nn.Module):
    """Hands every block what `make` gives for a batch."""

    def __init__(self, make: Any, writes: bool = False, gives: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.make, self.flags = make, (writes, gives)

    def forward(self, x: Tensor) -> Tensor:
        more = self.make(x)
        for block in self.blocks:
            x = block(x, more, *self.flags)
        return x.x if isinstance(x, Given) else x


def quantized(model: Model) -> str:
    """The report of AWQ, which the model's outputs have survived."""
    x = torch.randn(16, 64)
    wanted = model.eval()(x)
    lz.quantize_(model, AWQ, data=[x, x + 1], objective="size")
    assert (model(x) - wanted).norm() < 0.2 * wanted.norm()
    return str(lz.quantization_report(model))


READ: dict[str, Any] = {
    "frozen dataclass": lambda x: Tables(x.mean(-1, keepdim=True)),
    "dataclass": lambda x: Notes(x.mean(-1, keepdim=True)),
    "partial": lambda x: partial(torch.mul, x.mean(-1, keepdim=True)),
    "bound method": lambda x: Tables(x).times,
    "NumPy scalar": lambda x: np.float32(0.5),
}


@pytest.mark.parametrize("kind", READ)
def test_what_is_only_read_is_no_obstacle(kind: str) -> None:
    model = Model(READ[kind])
    gains = [block.norm.weight.detach().clone() for block in model.blocks]
    told = quantized(model)
    assert "scaled no channels" not in told
    assert "running all blocks" not in told
    scaled = [not torch.equal(a, b.norm.weight) for a, b in zip(gains, model.blocks, strict=True)]
    assert any(scaled)


def test_a_dataclass_as_output_is_scaled_behind_all_blocks_before_it() -> None:
    told = quantized(Model(READ["NumPy scalar"], gives=True))
    assert "scaled no channels" not in told
    assert "give back an object (Given): each was calibrated by running all blocks" in told


@pytest.mark.parametrize(
    ("model", "name"),
    [(Model(READ["dataclass"], writes=True), "Notes"), (Model(lambda x: Plain()), "Plain")],
)
def test_what_may_be_written_to_is_told(model: Model, name: str) -> None:
    told = " ".join(quantized(model).split())
    assert f"scaled no channels: blocks share an object that they may write to ({name})" in told
    assert f"may write to ({name}): each was calibrated by running all blocks" in told
    assert "read more than" not in told


def test_tensors_in_a_dataclass_count_as_what_a_block_is_given() -> None:
    class Sums(Model):
        def forward(self, x: Tensor) -> Tensor:
            seen = [x]
            for block in self.blocks:
                seen.append(block(x, Tables(sum(seen)), False, False))
            return seen[-1]

    with torch.no_grad(), Spill() as spill:
        model = Sums(None).eval()
        assert not Replay(model, [torch.randn(4, 64)], blocks(model), spill).is_chain
