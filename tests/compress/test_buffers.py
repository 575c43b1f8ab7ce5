"""What a model keeps of the sequences it saw fits together after calibration."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.models import Transformer, TransformerConfig
from lezero.models.config import RopeScaling


class Position(nn.Module):
    """A table that grows and a scale, with their length beside them, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))
        self.length, self.seen = 0, list[int]()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.length:
            self.length = len(x)
            self.table = torch.arange(self.length, dtype=torch.float32)[:, None]
            self.scale = torch.full((), 1 / self.length)
        self.seen.append(len(x))
        self.mean += (x.mean() - self.mean) / len(self.seen)
        return self.layer(x + self.table[: len(x)] * self.scale)


def test_a_table_stays_with_its_length() -> None:
    model, x = nn.Sequential(Position()), torch.randn(16, 64)
    lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
    assert model[0].length == len(model[0].table) == 16
    assert (float(model[0].scale), float(model[0].mean)) == (1 / 16, 0)
    assert model(x).shape == x.shape


class Cache(nn.Module):
    """What it saw before, under a name that begins as `kind` says; with a counter beside it, or
    what it gave last."""

    def __init__(self, kind: str, counts: bool = False) -> None:
        super().__init__()
        self.kind, self.count, self.last = kind, 0 if counts else None, None
        if kind.startswith("None in a buffer"):
            self.register_buffer("cache", None, persistent=kind.endswith("saved"))
        elif kind == "None":
            self.cache = None
        elif kind == "a buffer":
            self.register_buffer("cache", torch.ones(1, 64), persistent=False)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        cache = getattr(self, "cache", None)
        if self.kind == "a buffer" and cache is not None:
            del self.cache
        elif cache is None and self.kind.startswith("new buffer"):
            self.register_buffer("cache", y, persistent=self.kind.endswith("saved"))
        else:
            self.cache = y if cache is None else torch.cat([cache, y])
        if self.count is not None:
            self.count += len(x)
        self.last = y
        return y if cache is None else y + cache.mean(0)


KINDS = [
    *("None in a buffer", "None in a buffer, saved", "None", "new attribute"),
    *("new buffer", "new buffer, saved", "a buffer"),
]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_calibration_filled_is_empty_again(kind: str, fails: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Cache(kind), nn.Linear(64, 64)).eval()
    (cache, last), x = model, torch.randn(4, 64)
    wanted, held = copy.deepcopy(model)(x), cache_names(cache)
    state = set(last.state_dict()), set(model.state_dict())
    if fails:
        with pytest.raises(lz.NumericsError, match="The model is as it was"):
            lz.quantize_(model, lz.Int4Weight(group=32), data=x, objective="size", budget=0)
        assert set(model.state_dict()) == state[1]
    else:
        lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
        tensors = [*model.parameters(), *model.buffers()]
        assert lz.quantization_report(model).bytes_after == sum(x.nbytes for x in tensors)
    assert cache_names(cache) == held
    assert cache.last is None
    assert (model(x) - wanted).norm() < 0.02 * wanted.norm()


def cache_names(module: Any) -> list[Any]:
    plain = "cache" in vars(module), vars(module).get("cache")
    table = "cache" in module._buffers, module._buffers.get("cache") is None
    return [*plain, *table, {*module._non_persistent_buffers_set}]


def test_a_cache_stays_with_its_length() -> None:
    for kind in KINDS[:-1]:
        model, x = nn.Sequential(Cache(kind, counts=True)), torch.randn(4, 64)
        lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
        assert len(model[0].cache) in (4, model[0].count)
        assert model[0].last is not None


class Rope(nn.Module):
    """Notes in a dict that it has its table."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "length" not in self.made:
            self.made["length"] = len(x)
            self.register_buffer("table", torch.ones(1, 128), persistent=False)
        return x * self.table


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        return x * self.scale


class Filled(nn.Module):
    """Notes that the module inside of it has its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.ready = Scaled(), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.inner.scale, self.ready = torch.ones(128), True
        return self.inner(x)


@pytest.mark.parametrize("kind", [Rope, Filled])
def test_a_tensor_of_which_a_module_knows_that_it_is_there_stays(kind: type[nn.Module]) -> None:
    x = torch.randn(8, 128)
    model = nn.Sequential(kind(), nn.Linear(128, 128)).eval()
    lz.quantize_(model, lz.Int8Weight(), data=[x], objective="size")
    assert model(x).isfinite().all()


class Prototype(nn.Module):
    """A parameter that `forward` writes, with a flag in a buffer beside it, or in an attribute."""

    def __init__(self, trains: bool, plain: bool = False) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(64), trains)
        self.register_buffer("ready", torch.tensor(False))
        self.plain, self.known = plain, False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.known if self.plain else self.ready):
            self.mean.data.copy_(x.mean(0))
            self.known = self.plain
            self.ready.fill_(True)
        return x - self.mean


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_a_parameter_that_forward_writes_is_what_it_was(trains: bool, fails: bool) -> None:
    model, x = nn.Sequential(Prototype(trains), nn.Linear(64, 64)).eval(), torch.randn(4, 64)
    if fails:
        with pytest.raises(lz.NumericsError, match="The model is as it was"):
            lz.quantize_(model, lz.Int4Weight(group=32), data=x, objective="size", budget=0)
    else:
        lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
    prototype = model[0]
    assert not prototype.ready
    assert torch.equal(prototype.mean, torch.zeros(64))
    assert prototype.mean.requires_grad == trains


def test_a_parameter_stays_with_its_flag() -> None:
    model, x = nn.Sequential(Prototype(True, plain=True), nn.Linear(64, 64)), torch.randn(4, 64)
    lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
    assert model[0].known
    assert torch.equal(model[0].mean, x.mean(0))


@pytest.mark.parametrize("seen", [0, 40])
def test_dynamic_angles_of_transformers_are_those_of_the_length(seen: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64,
        num_attention_heads=2, max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )  # fmt: skip
    model, x = transformers.LlamaModel(config).eval(), torch.randint(0, 64, (1, 60))
    if seen:
        model(x[:, :seen])
    given = torch.zeros(1), torch.arange(60)[None]
    wanted, _ = copy.deepcopy(model.rotary_emb)(*given)
    lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
    assert torch.equal(model.rotary_emb(*given)[0], wanted)


SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 4.0,
        "original_context": 16,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_angles_are_those_of_the_length(kind: str) -> None:
    scaling = RopeScaling.parse({"kind": kind, **SCALINGS[kind]}, "scaling")
    shape = {"dim": 64, "layers": 1, "heads": 2, "ffn": 64, "vocab": 64}
    context = 16 if kind == "dynamic" else 64
    config = TransformerConfig(**shape, context=context, rope_scaling=scaling)
    model, x = Transformer(config).eval(), torch.randint(0, 64, (1, 30))
    wanted = copy.deepcopy(model.rope)
    wanted.ready(30, torch.device("cpu"))
    lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
    model.rope.ready(30, torch.device("cpu"))
    assert torch.equal(model.rope.cos_TP[:30], wanted.cos_TP[:30])
