"""Packed weights where kernels read rows: what is held changes with the device, what is saved not.

A machine without an accelerator stands in for one: here it is said whether its kernels read rows.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import load_quantized, save_quantized
from lezero.compress.quantize.ordered import OrderedWeight
from lezero.compress.quantize.weights import PackedWeight
from lezero.models import Transformer
from lezero.ops.linear import in_rows, rows
from lezero.ops.quantize import Grid, quantize
from tests.compress.test_quantize import small, tokens

SCHEMES = {
    "int8": lz.Int8Weight(),
    "int8 g32": lz.Int8Weight(group=32, zero_point=True),
    "w8a8": lz.Int8WeightActivation(activations="tensor"),
    "int4": lz.Int4Weight(group=32),
    "int4 g64 symmetric": lz.Int4Weight(group=64, zero_point=False),
}
Move = Callable[[nn.Module, bool], nn.Module]


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch) -> Move:
    """Moves a model to what reads rows, or to what reads panels."""

    def moved(model: nn.Module, to_rows: bool) -> nn.Module:
        monkeypatch.setattr(rows, "takes_rows", lambda place: to_rows and place.type == "cpu")
        return model.to("cpu")

    return moved


def made(name: str) -> Transformer:
    model = small(tied=True)
    lz.quantize_(model, SCHEMES[name], data=tokens(), objective="size")
    return model


def held(model: nn.Module) -> list[PackedWeight]:
    return [m for m in model.modules() if isinstance(m, PackedWeight)]


def without_time(file: Path) -> Any:
    """A manifest tells when it was written, and its digest covers that."""
    if file.name != "manifest.json":
        return file.read_bytes()
    found = json.loads(file.read_bytes())
    assert found.pop("digest")
    assert found.pop("created")
    return found


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens()[0])
    return found


def alike(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return list(one) == list(two) and all(
        x.dtype == two[name].dtype and torch.equal(x, two[name]) for name, x in one.items()
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_a_model_goes_there_and_back(name: str, move: Move) -> None:
    model = made(name)
    state, wanted = copy.deepcopy(model.state_dict()), logits(model)
    decoded = [weight.decode() for weight in held(model)]
    move(model, True)
    assert held(model)
    assert all(in_rows(weight.parts()) for weight in held(model))
    assert alike(model.state_dict(), state)
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0)
    assert all(torch.equal(w.decode(), x) for w, x in zip(held(model), decoded, strict=True))
    twin = copy.deepcopy(model)
    assert all(in_rows(weight.parts()) for weight in held(twin))
    assert alike(twin.state_dict(), state)
    move(model, False)
    assert not any(in_rows(weight.parts()) for weight in held(model))
    assert alike(model.state_dict(), state)
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_is_read_where_rows_are(assign: bool, move: Move) -> None:
    model = made("int4")
    state = copy.deepcopy(model.state_dict())
    other = small(tied=True, seed=1)
    lz.quantize_(other, SCHEMES["int4"], objective="size")
    assert not alike(other.state_dict(), state)
    move(other, True)
    other.load_state_dict(state, assign=assign)
    assert all(in_rows(weight.parts()) for weight in held(other))
    assert alike(other.state_dict(), state)
    assert torch.equal(logits(other), logits(model))
    state.pop("layers.0.self_attn.q_proj.weight.scale")
    with pytest.raises(RuntimeError, match=r"Missing key.*q_proj\.weight\.scale"):
        other.load_state_dict(state)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_folder_does_not_depend_on_the_device(name: str, move: Move, tmp_path: Path) -> None:
    model = made(name)
    wanted = logits(model)
    save_quantized(model, tmp_path / "panels")
    move(model, True)
    save_quantized(model, tmp_path / "rows")
    names = sorted(path.name for path in (tmp_path / "panels").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "rows").iterdir())
    for file in names:
        one, two = (without_time(tmp_path / form / file) for form in ("panels", "rows"))
        assert one == two, file
    opened = load_quantized(tmp_path / "panels")
    assert all(in_rows(weight.parts()) for weight in held(opened))
    assert torch.equal(logits(opened), wanted)
    move(opened, False)
    assert torch.equal(logits(opened), wanted)


def test_what_others_read_does_not_depend_on_the_device(move: Move, tmp_path: Path) -> None:
    model = small()
    lz.quantize_(model, lz.Int4Weight(group=32, zero_point=False), objective="size")
    move(model, True)
    save_quantized(model, tmp_path / "rows", layout="compressed-tensors")
    move(model, False)
    save_quantized(model, tmp_path / "panels", layout="compressed-tensors")
    one, two = ((tmp_path / x / "model.safetensors").read_bytes() for x in ("rows", "panels"))
    assert one == two


def test_tied_layers_are_turned_and_saved_once(move: Move) -> None:
    pair = nn.Sequential(nn.Embedding(48, 64), nn.Linear(64, 48, bias=False))
    pair[1].weight = pair[0].weight  # type: ignore[assignment]
    lz.quantize_(pair, lz.Int8Weight(), objective="size")
    move(pair, True)
    assert pair[0].weight is pair[1].weight
    before = pair[0].weight.packed
    move(pair, True)
    assert pair[0].weight.packed is before
    state = pair.state_dict()
    assert state["0.weight.packed"].data_ptr() == state["1.weight.packed"].data_ptr()
    assert state["0.weight.packed"].shape == (3, 16, 16, 4)
    # A weight that changed is no longer what was saved.
    with torch.no_grad():
        pair[0].weight.packed.zero_()
    again = pair.state_dict()
    assert not torch.equal(again["0.weight.packed"], state["0.weight.packed"])
    pair[0].weight.scale = torch.zeros_like(pair[0].weight.scale)
    assert not pair.state_dict()["0.weight.scale"].any()


def test_plain_layers_come_back_from_rows(move: Move) -> None:
    one, two = made("int4"), made("int4")
    lz.dequantize_(one)
    lz.dequantize_(move(two, True))
    assert alike(one.state_dict(), two.state_dict())


def test_layers_are_made_in_rows(move: Move) -> None:
    model = made("int4")
    move(nn.Identity(), True)
    assert all(in_rows(weight.parts()) for weight in held(made("int4")))
    assert not any(in_rows(weight.parts()) for weight in held(model))
    grid = Grid("int4", group=32)
    codes = quantize(torch.randn(20, 64), grid)
    weight = OrderedWeight.ordered(codes, torch.randperm(64), grid, torch.float32)
    assert in_rows(weight.parts())
    x = torch.randn(2, 64)
    near = {"rtol": 0.0, "atol": 2e-3}
    torch.testing.assert_close(weight.linear(x, None, 16, None), x @ weight.decode().T, **near)


def test_bytes_are_those_that_are_held(move: Move) -> None:
    model = made("int4")
    for to_rows in (True, False):
        move(model, to_rows)
        for weight in held(model):
            assert weight.nbytes == sum(x.nbytes for x in weight.parts() if x is not None)


def test_meta_has_panels(move: Move) -> None:
    model = made("int4")
    shapes = {name: x.shape for name, x in model.state_dict().items()}
    move(model, True)
    assert {name: x.shape for name, x in model.to("meta").state_dict().items()} == shapes
    assert not any(in_rows(weight.parts()) for weight in held(model))


def test_a_pickle_is_read_where_rows_are(move: Move) -> None:
    model = made("int4")
    written, state = pickle.dumps(model), copy.deepcopy(model.state_dict())
    move(model, True)
    found = pickle.loads(written)
    assert all(in_rows(weight.parts()) for weight in held(found))
    assert alike(found.state_dict(), state)
