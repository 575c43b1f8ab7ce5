"""What one block reads of another, beside what that gives out, counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.replay import Replay
from lezero.compress.quantize.spill import Spill
from lezero.nn.blocks import blocks
from tests.compress.test_folds import AWQ, SMOOTH, quantized
from tests.compress.test_quantize import difference, small, tokens

NOTE = "blocks read values that another keeps: each was calibrated by running all blocks before it"
ROUNDED = lz.Int4Weight(group=32, scales="minmax")
TOKENS = lz.Int8WeightActivation(smooth=None)
STATIC = lz.Int8WeightActivation(activations="tensor", smooth=None)


class Block(nn.Module):
    """`kept`: what blocks share; the first one keeps there what lies between its layers."""

    def __init__(self, kept: dict[str, Any], first: bool) -> None:
        super().__init__()
        self.kept, self.first = kept, first
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        if self.first:
            self.keep(x, h)
        else:
            h = self.mixed(h)
        return x + self.down(h)

    def keep(self, x: Tensor, h: Tensor) -> None:
        self.kept["h"] = h

    def mixed(self, h: Tensor) -> Tensor:
        return 0.1 * h + self.kept["h"]


class Buffered(Block):
    """Into memory that was there before."""

    def keep(self, x: Tensor, h: Tensor) -> None:
        if "h" not in self.kept or self.kept["h"].shape != h.shape:
            self.kept["h"] = torch.zeros_like(h)
        torch._foreach_copy_([self.kept["h"]], [h])


class OfWeight(Block):
    """Others multiply by a weight of the first one."""

    def keep(self, x: Tensor, h: Tensor) -> None:
        self.kept["down"] = self.down

    def mixed(self, h: Tensor) -> Tensor:
        return h + 0.1 * F.linear(h, self.kept["down"].weight)


class Counts(Block):
    """A number that tells of the inputs."""

    def keep(self, x: Tensor, h: Tensor) -> None:
        self.kept["most"] = float(x.abs().max())

    def mixed(self, h: Tensor) -> Tensor:
        return h * self.kept["most"]


class Keeping(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        kept: dict[str, Any] = {}
        self.layers = nn.ModuleList(kind(kept, first=not index) for index in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def uneven(kind: type[Block]) -> Keeping:
    """With outlier channels, which are worth scaling."""
    torch.manual_seed(0)
    model = Keeping(kind).eval()
    for layer in model.layers:
        layer.up.weight.data[:6] *= 30
    return model


@pytest.mark.parametrize("kind", [Block, Buffered, OfWeight])
@pytest.mark.parametrize(("scheme", "plain"), [(AWQ, ROUNDED), (SMOOTH, TOKENS)])
def test_what_another_block_reads_is_not_scaled(scheme: Any, plain: Any, kind: type[Block]) -> None:
    model, data = uneven(kind), [torch.randn(16, 64) for _ in range(2)]
    with torch.no_grad():
        made, rounded = quantized(model, scheme, data), quantized(model, plain, data)
        assert torch.equal(made.layers[0].up.bias, model.layers[0].up.bias)
        x = data[0]
        assert difference(made(x), model(x)) < 1.1 * difference(rounded(x), model(x))


@pytest.mark.parametrize("kind", [Block, Buffered, Counts])
def test_each_batch_meets_what_was_kept_of_it(kind: type[Block]) -> None:
    torch.manual_seed(0)
    model, data = Keeping(kind).eval(), [torch.randn(8, 64) * size for size in (8, 4, 2, 1)]
    most = [0.0, 0.0, 0.0]
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            layer.down.register_forward_pre_hook(
                lambda _, args, k=index: most.__setitem__(k, max(most[k], float(args[0].max())))
            )
        for batch in data:
            model(batch)
        wanted = torch.tensor(most) / 127
        made = quantized(model, STATIC, data)
    scales = torch.stack([layer.down.input_scale for layer in made.layers]).flatten()
    assert torch.allclose(scales, wanted, rtol=0.05)
    notes = lz.quantization_report(made).notes
    assert any("running all blocks before it" in note for note in notes)
    assert (NOTE in notes) is (kind is not Counts)


def test_batches_of_two_shapes_are_taken_where_blocks_keep_values() -> None:
    model, data = Keeping(Block).eval(), [torch.randn(8, 64), torch.randn(4, 64)]
    with torch.no_grad():
        made = quantized(model, lz.Int8Weight(method="gptq"), data)
        assert difference(made(data[1]), model(data[1])) < 0.02


class Cached(Block):
    """What the first batch makes is there for all."""

    def keep(self, x: Tensor, h: Tensor) -> None:
        if "h" not in self.kept:
            self.kept["h"] = torch.linspace(0, 1, 64)


class Observed(nn.Module):
    """Its outputs are those of a layer in its first block, too."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small()
        self.seen: list[Tensor] = []
        self.model.layers[0].mlp.up_proj.register_forward_hook(lambda *x: self.seen.append(x[2]))

    def forward(self, x: Tensor) -> Any:
        self.seen.clear()
        return self.model(x), self.seen[0]


def test_what_reaches_no_other_block_leaves_it_a_chain() -> None:
    with torch.no_grad(), Spill() as spill:
        for model, data, opened in (
            (small(), tokens(2), 0),
            (Keeping(Cached).eval(), [torch.randn(8, 64)] * 2, 0),
            (Observed(), tokens(2), 1),
        ):
            replay = Replay(model, data, blocks(model), spill)
            assert replay.is_chain, replay.why_no_chain
            assert len(replay.open) == opened
            assert not replay.read_elsewhere
