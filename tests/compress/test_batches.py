"""Calibration batches stay what they are, whatever a model does with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lezero as lz
from lezero.compress.quantize.batches import comparable, read_batches
from lezero.compress.quantize.modules import quantized_layers
from lezero.core import facts
from lezero.nn.buffers import BufferSnapshot
from tests.compress.test_quantize import difference


class Normalizes(nn.Module):
    """Works in place on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor, same: Tensor | None = None) -> Tensor:
        assert same is None or same is x
        return self.inner(x.sub_(0.5).div_(0.25))


@pytest.mark.parametrize("shape", ["one", "list", "tuple", "mapping"])
def test_a_model_that_writes_to_its_inputs(shape: str) -> None:
    torch.manual_seed(0)
    model, x = Normalizes().eval(), torch.rand(32, 64)
    wanted, before = model(x.clone()).detach(), x.clone()
    data: Any = {"one": x, "list": [x, x], "tuple": (x, x), "mapping": {"x": x, "same": x}}[shape]
    scheme = lz.Int8WeightActivation(activations="tensor")
    lz.quantize_(model, scheme, data=data, objective="size", budget=0.05)
    assert torch.equal(x, before)
    assert difference(model(x.clone()).detach(), wanted) < 0.05


class Graph(nn.Module):
    """Layers alike that are given a sparse matrix, or keep one."""

    def __init__(self, edges: Tensor | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.sparse.mm(self.edges if edges is None else edges, layer(x)).relu()
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("method", ["nearest", "gptq"])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_tensors(layout: torch.layout, kept: bool, method: str) -> None:
    torch.manual_seed(0)
    edges = (torch.rand(50, 50) < 0.1).float().to_sparse(layout=layout)
    model, x = Graph(edges if kept else None).eval(), torch.randn(50, 64)
    batch = (x,) if kept else (x, edges)
    with torch.no_grad():
        wanted = model(*batch)
        lz.quantize_(model, lz.Int8Weight(method=method), data=[batch, batch], objective="size")
        assert difference(model(*batch), wanted) < 0.05


def test_a_buffer_that_is_a_conjugate_stays_one() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    turns = torch.polar(torch.ones(4), torch.rand(4))
    model.register_buffer("turns", turns.conj())
    lz.quantize_(model, lz.Int8Weight(), data=torch.randn(3, 64), objective="size")
    assert model.turns.is_conj()
    assert torch.equal(model.turns, turns.conj())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("filter", [None, "1"])
def test_a_part_in_torchscript_is_left_alone(filter: str | None) -> None:
    parts = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))  # which has buffers
    model = nn.Sequential(torch.jit.script(parts), nn.Linear(64, 64))
    data = torch.randn(3, 64)
    lz.quantize_(model, lz.Int8Weight(), data=data, filter=filter, objective="size")
    assert len(quantized_layers(model)) == 1
    (kept, *_) = BufferSnapshot(model)._kept
    assert not kept[1].goes_with_notes(training=False)


class Reads(Dataset[Tensor]):
    """Counts what is read of it."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        return torch.zeros(64)


def test_a_loader_that_memory_does_not_hold_is_not_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = Reads(9), Reads(9000)
    with pytest.raises(lz.ConfigError, match=r"gave 1 batches \(.*of 4,500.*islice\(data, 64\)"):
        read_batches(DataLoader(many, batch_size=2))
    assert many.read == 2
    assert len(read_batches(DataLoader(few, batch_size=2))) == 5
    room = dataclasses.replace(facts.memory(), available=2048)
    monkeypatch.setattr("lezero.compress.quantize.batches.memory", lambda: room)
    with pytest.raises(lz.ConfigError, match=r"gave 3 batches \(.*of 5"):
        read_batches(DataLoader(few, batch_size=2))
    assert len(read_batches([torch.zeros(2, 64)] * 9)) == 9


@pytest.mark.parametrize(
    ("batch", "kinds"),
    [
        ({"input": np.zeros((2, 64), np.float32)}, "ndarray"),
        (
            {"input_ids": [[1, 2], [3, 4]], "mask": [[1, 1], [1, 1]], "use_cache": False},
            "list, bool",
        ),
        ((np.zeros((2, 64)),), "ndarray"),
    ],
    ids=["arrays", "lists", "tuple"],
)
def test_a_batch_without_tensors_is_not_called_empty(batch: Any, kinds: str) -> None:
    said = f"batch 0 holds no tensor, but {kinds}; convert .*return_tensors='pt'.*torch.as_tensor"
    with pytest.raises(lz.ConfigError, match=said):
        read_batches([batch])
    with pytest.raises(lz.ConfigError, match="batch 0 is empty"):
        read_batches([{}])


def test_all_that_an_output_says_is_comparable() -> None:
    x = torch.ones(2)
    found = comparable((x, {"a": True, "b": 3}, 0.5, 2j, 2**2000, None, "text", torch.tensor([1j])))
    said = [[1, 1], 1, 3, [0.5, 0], [0, 2], 2**2000 % (2**61 - 1), [[0, 1]]]
    assert [tensor.tolist() for tensor in found] == said
    one, two = (comparable((x, number))[1] for number in (-1, -2))
    assert one != two
    assert comparable((3, torch.tensor(4))) == comparable((x, object())) == []
    with torch.device("meta"):
        assert [tensor.device.type for tensor in comparable((x, 0.5, 1))] == ["cpu"] * 3
