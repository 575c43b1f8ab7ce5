"""Blocks get the inputs they get in an ordinary run, without those before them being computed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.replay import Replay
from lezero.compress.quantize.spill import Spill
from lezero.nn.blocks import blocks
from tests.compress.test_quantize import small, tokens


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> tuple[Tensor, None]:
        return torch.tanh(self.inner(x)) + (0 if shift is None else shift), None


class Chain(nn.Module):
    """Two lists of blocks; the second reads what the first gave, as a decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.encoder:
            y, _ = block(y)
        z = x * 0.5
        for block in self.decoder:
            z, _ = block(z, shift=y)
        return z


class Skips(nn.Module):
    """Each block reads the sum of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for block in self.parts:
            seen.append(block(sum(seen))[0])
        return seen[-1]


def inputs_seen(model: nn.Module, batches: list[Any]) -> list[list[Tensor]]:
    seen: list[list[Tensor]] = []
    hooks = []
    for index, (_, block) in enumerate(blocks(model)):
        seen.append([])
        hook = block.register_forward_pre_hook(
            lambda module, args, index=index: seen[index].append(args[0].clone())
        )
        hooks.append(hook)
    for batch in batches:
        model(*batch) if isinstance(batch, tuple) else model(batch)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(("kind", "is_chain"), [(Chain, True), (Skips, False)])
def test_replayed_inputs_are_the_ordinary_ones(kind, is_chain):
    torch.manual_seed(0)
    model, batches = kind(), [torch.randn(2, 16), torch.randn(3, 16)]
    with torch.no_grad(), Spill() as spill:
        wanted = inputs_seen(model, batches)
        before = {name: module.__dict__.keys() for name, module in model.named_modules()}
        replay = Replay(model, batches, blocks(model), spill)
        assert replay.is_chain is is_chain
        for index, (_, block) in enumerate(replay.blocks):
            forward = block.forward
            for batch in range(2):
                given = []

                def visit(x, *args, given=given, forward=forward, **kwargs):
                    given.append(x.clone())
                    return forward(x, *args, **kwargs)

                replay.run(batch, index, visit)
                assert torch.equal(given[0], wanted[index][batch])
        after = {name: module.__dict__.keys() for name, module in model.named_modules()}
    assert before == after


def test_blocks_before_are_not_computed():
    model, batches = small(), tokens(1)
    with torch.no_grad(), Spill() as spill:
        replay = Replay(model, batches, blocks(model), spill)
        first = model.layers[0].forward
        replay.run(0, 0, first)
        model.layers[0].mlp.up_proj.forward = None  # any call would fail
        replay.run(0, 1, model.layers[1].forward)
        del model.layers[0].mlp.up_proj.forward


def test_a_model_with_skips_is_quantized_and_said_so():
    torch.manual_seed(0)
    model, x = Skips(), torch.randn(8, 16)
    wanted = model(x)
    lz.quantize_(model, lz.Fp8(), data=x, objective="size")
    assert "running all blocks before it" in str(lz.quantization_report(model))
    assert (model(x) - wanted).norm() < 0.1 * wanted.norm()


class Towers(nn.Module):
    """An encoder that only batches with an image go through, and a decoder, whose second block
    leaves out the batches that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Block() for _ in range(2))
        self.text = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        if image is not None:
            for block in self.vision:
                image, _ = block(image)
            x = x + image
        for index, block in enumerate(self.text):
            if image is not None or index != 1:
                x, _ = block(x)
        return x


def test_a_batch_that_does_not_come_to_a_block_adds_nothing_to_it() -> None:
    torch.manual_seed(0)
    model, x, image = Towers().eval(), torch.randn(4, 16), torch.randn(4, 16)
    batches = [(x, image), (x,)]
    with torch.no_grad(), Spill() as spill:
        (first, second), wanted = (inputs_seen(model, [batch]) for batch in batches), model(x)
        replay = Replay(model, batches, blocks(model), spill)
        for index, (_, block) in enumerate(replay.blocks):
            for batch, seen in enumerate((first, second)):
                given = []

                def visit(x, given=given, forward=block.forward):
                    given.append(x.clone())
                    return forward(x)

                assert replay.run(batch, index, visit) is bool(seen[index])
                assert len(given) == len(seen[index])
                assert all(map(torch.equal, given, seen[index]))
        lz.quantize_(model, lz.Fp8(), data=batches, objective="size")
        assert (model(x) - wanted).norm() < 0.1 * wanted.norm()


def test_what_is_spilled_comes_back_bit_for_bit():
    tree = {
        "a": (torch.randn(3, 4).bfloat16().T, None),
        "b": [torch.arange(3), 7, torch.zeros(0, 2)],
    }
    with Spill() as spill:
        spill.put("x", tree)
        back = spill.get("x")
        assert torch.equal(back["a"][0], tree["a"][0])
        assert back["a"][1] is None
        assert back["b"][1] == 7
        assert back["b"][2].shape == (0, 2)
        spill.drop("x")
        assert "x" not in spill
        with pytest.raises(lz.CapacityError, match="LEZERO_CACHE"):
            spill.need(1 << 62, "this")


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_full_disk_is_told_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Any, mode: str, **more: Any) -> Any:
        return open("/dev/full", mode, **more)

    monkeypatch.setattr("lezero.compress.quantize.spill.open", full, raising=False)
    with Spill() as spill, pytest.raises(lz.CapacityError, match=r"No space left.*LEZERO_CACHE"):
        spill.put("x", torch.ones(size))


def test_what_a_killed_process_has_spilled_goes_with_the_next_one(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path))
    code = (
        "import os, signal, torch\n"
        "from lezero.compress.quantize.spill import Spill\n"
        "spill = Spill().__enter__()\n"
        "spill.put('x', torch.ones(1000))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == -9
    assert list(tmp_path.rglob("0"))
    with Spill() as spill:
        spill.put("y", torch.ones(10))
        assert len(list(tmp_path.rglob("0"))) == 1
    assert not list(tmp_path.rglob("0"))


class State:
    """What blocks hand on: `depth` counts those that it went through."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.depth = x, 0


class Writes(nn.Module):
    """A block that writes to an object, and gives it or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, state: State) -> State:
        state.x = state.x + 3 * self.inner(state.x)
        state.depth += 1
        return state


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writes() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state)
        assert state.depth == 3
        return state.x


def static_scales(model: nn.Module) -> Tensor:
    return torch.cat([m.input_scale for m in model.modules() if hasattr(m, "input_scale")])


def test_blocks_that_write_to_an_object_get_it_as_in_an_ordinary_run() -> None:
    torch.manual_seed(0)
    model, batches = Handing().eval(), [torch.randn(8, 64), torch.randn(8, 64)]
    with torch.no_grad():
        seen: list[list[Tensor]] = [[], [], []]
        for index, block in enumerate(model.blocks):
            block.inner.register_forward_pre_hook(
                lambda module, args, index=index: seen[index].append(args[0])
            )
        for batch in batches:
            model(batch)
        wanted = torch.stack([torch.cat(xs).abs().max() / 127 for xs in seen])
        scheme = lz.Int8WeightActivation(activations="tensor", smooth=None)
        lz.quantize_(model, scheme, data=batches, objective="size")
    # Blocks before have rounded weights by then.
    assert torch.allclose(static_scales(model), wanted, rtol=0.05)
    assert "running all blocks before it" in str(lz.quantization_report(model))


class Loops(nn.Module):
    """Goes through its blocks as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block(64) for _ in range(3))

    def forward(self, x: Tensor, times: int, skips: bool = False) -> Tensor:
        for _ in range(times):
            for block in self.parts:
                more, _ = block(x)
                x = x + more if skips else 2 * more
        return x


@pytest.mark.parametrize("first", [1, 3])
def test_the_order_of_every_kind_of_batch_counts(first: int) -> None:
    torch.manual_seed(0)
    model, x = Loops().eval(), torch.randn(4, 64)
    once = [(x, 1), (x + 1, 1)]
    other = (4 * x, 4 - first)
    with torch.no_grad(), Spill() as spill:
        assert len(Replay(model, once, blocks(model), spill).blocks) == 3
        assert not Replay(model, [(x, first), other], blocks(model), spill).blocks
        wanted = model(*other)
        scheme = lz.Int8WeightActivation(activations="tensor", smooth=None)
        lz.quantize_(model, scheme, data=[(x, first), other], objective="size")
        assert (model(*other) - wanted).norm() < 0.1 * wanted.norm()


def test_the_paths_of_every_kind_of_batch_count() -> None:
    model, x = Loops().eval(), torch.randn(4, 64)
    with torch.no_grad(), Spill() as spill:
        for batches, is_chain in (
            ([(x, 1), (x[:2], 1)], True),
            ([(x, 1), (x, 1, True)], False),
            ([(x, 1, True), (x, 1)], False),
        ):
            replay = Replay(model, batches, blocks(model), spill)
            assert len(replay.blocks) == 3
            assert replay.is_chain is is_chain


def test_of_batches_that_are_alike_two_are_run() -> None:
    model, x = Loops().eval(), torch.randn(4, 64)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    with torch.no_grad(), Spill() as spill:
        Replay(model, [(x, 1)] * 2, blocks(model), spill)
        two = len(calls)
        Replay(model, [(x, 1)] * 5, blocks(model), spill)
        assert len(calls) == 2 * two


class Shifted(nn.Module):
    """Gives its blocks one value of a row, which lies as the row does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(64) for _ in range(2))
        self.register_buffer("row", torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x, _ = block(x, shift=self.row[:, 1])
        return x


def test_one_value_of_a_row_is_kept_for_the_next_block() -> None:
    model, x = Shifted(), torch.randn(4, 64)
    lz.quantize_(model, lz.Int4Weight(method="gptq"), data=[x, x + 1], objective="size")
    assert len(lz.quantization_report(model).layers) == 2


class Exits(nn.Module):
    """Leaves where what is in front of its blocks is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(3))
        self.sure = 0.5

    def forward(self, x: Tensor) -> Tensor:
        sure = x.mean() > self.sure
        for index, block in enumerate(self.parts):
            if sure and index == 1:
                break
            x, _ = block(x)
        return x


def test_a_batch_that_left_early_does_not_come_to_later_blocks() -> None:
    """Not even where what decides is another since it was quantized."""
    model = Exits().eval()
    batches = [torch.zeros(2, 16), torch.zeros(2, 16), torch.ones(2, 16)]
    with torch.no_grad(), Spill() as spill:
        replay = Replay(model, batches, blocks(model), spill)
        assert replay.is_chain
        runs = [replay.run(2, k, replay.blocks[k][1].forward) for k in (0, 1)]
        model.sure = 2.0
        runs += [replay.run(2, 2, replay.blocks[2][1].forward)]
    assert runs == [True, False, False]
