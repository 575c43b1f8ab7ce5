"""What proves a fold: a pair that the data says nothing of is not scaled, nor one of a layer that
the filter leaves out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lezero as lz
from tests.compress.test_quantize import difference, small, tokens

AWQ = lz.Int4Weight(group=32, method="awq", scales="minmax")
SCHEMES = pytest.mark.parametrize(
    "scheme", [AWQ, lz.Int8WeightActivation(), lz.Int8WeightActivation(smooth=0.5)]
)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(h)))


class Masked(nn.Module):
    """Every expert is computed, and all but one multiplied by `rest`."""

    def __init__(self, rest: float) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(64), nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        chosen = F.one_hot(self.router(h).argmax(-1), 4).float().clamp(min=self.rest)
        return x + sum(
            chosen[..., place, None] * expert(h) for place, expert in enumerate(self.experts)
        )


@pytest.mark.parametrize("rest", [0.0, 1e-7])
@SCHEMES
def test_an_expert_that_is_never_chosen_proves_nothing(scheme: Any, rest: float) -> None:
    torch.manual_seed(0)
    model, mean = nn.Sequential(Masked(rest), Masked(rest)), torch.randn(64)
    data = [mean + 0.3 * torch.randn(16, 64) for _ in range(2)]
    made = copy.deepcopy(model)
    lz.quantize_(made, scheme, data=data, objective="size", filter="*experts*")
    h = torch.randn(64, 64)
    bound = 0.02 if scheme is not AWQ else 0.15
    with torch.no_grad():
        for one, two in zip(model[0].experts, made[0].experts, strict=True):
            assert difference(two(made[0].norm(h)), one(model[0].norm(h))) < bound


class Adapted(nn.Module):
    """A norm with a reader whose part is nothing as yet: an adapter that begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one = nn.LayerNorm(64), nn.Linear(64, 64)
        self.norm.weight.data.normal_().exp_()
        self.first, self.second = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + torch.tanh(self.one(h)) + self.second(self.first(h))


@SCHEMES
def test_a_reader_without_a_part_in_the_outputs_counts(scheme: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted())
    made = copy.deepcopy(model)
    data = torch.randn(32, 64)
    lz.quantize_(made, scheme, data=data, objective="size", filter="*one")
    for one, two in zip(model, made, strict=True):
        assert torch.equal(one.norm.weight, two.norm.weight)


@SCHEMES
def test_layers_that_the_filter_leaves_out_are_not_written_to(scheme: Any) -> None:
    model = small()
    made = copy.deepcopy(model)
    lz.quantize_(made, scheme, data=tokens(), objective="size", filter="*down*")
    before = model.state_dict()
    for name, value in made.state_dict().items():
        assert "down" in name or torch.equal(value, before[name]), name


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one = nn.LayerNorm(64), nn.Linear(64, 64)
        self.one.adapter = nn.Linear(64, 64)
        self.one.register_forward_hook(lambda layer, args, y: y + 0.1 * layer.adapter(args[0]))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.one(self.norm(x)))


@SCHEMES
def test_a_layer_that_holds_an_adapter_is_quantized(scheme: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Hooked(), Hooked()).eval(), torch.randn(32, 64)
    with torch.no_grad():
        wanted = model(x)
        lz.quantize_(model, scheme, data=x, objective="size")
        assert difference(model(x), wanted) < 0.1
    assert all(layer.quantized for layer in lz.quantization_report(model).layers)


class Tells(nn.Module):
    """Gives, keeps or shows what its norm gives, in another way than as floating-point numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.kind = kind
        with torch.no_grad():
            self.norm.weight[:6] *= 30  # worth scaling

    def forward(self, x: Tensor, told: Any) -> tuple[Tensor, Any]:
        h = self.norm(x)
        y = x + self.down(F.relu(self.up(h)))
        if self.kind == "complex":
            return y, told + torch.fft.fft(h)
        if self.kind == "whole":
            return y, told + (100 * h).round().long()
        if self.kind == "truth":
            return y, (told > 0) ^ (h > 0.5)
        if self.kind == "number":
            return y, told + float(h.abs().sum())
        if self.kind == "kept":
            self.feature = h
        return y, told


class Telling(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(Tells(kind) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        told: Any = 0.0 if self.kind == "number" else torch.zeros_like(x)
        if self.kind == "complex":
            told = torch.complex(told, told)
        if self.kind == "whole":
            told = told.long()
        for layer in self.layers:
            x, told = layer(x, told)
        return x, torch.view_as_real(told) if self.kind == "complex" else torch.as_tensor(told)


@pytest.mark.parametrize("kind", ["complex", "whole", "truth", "number", "kept", "hooked"])
@SCHEMES
def test_a_norm_that_another_reads_is_not_scaled(scheme: Any, kind: str) -> None:
    torch.manual_seed(0)
    model = Telling(kind).eval()
    if kind == "hooked":
        model.layers[0].norm.register_forward_hook(lambda *_: None)
    made = copy.deepcopy(model)
    lz.quantize_(made, scheme, data=[torch.randn(4, 8, 64)], objective="size")
    assert torch.equal(made.layers[0].norm.weight, model.layers[0].norm.weight)


@SCHEMES
def test_a_norm_that_nothing_else_reads_is_scaled(scheme: Any) -> None:
    torch.manual_seed(0)
    model = Telling("nothing").eval()
    made = copy.deepcopy(model)
    lz.quantize_(made, scheme, data=[torch.randn(4, 8, 64)], objective="size")
    assert not torch.equal(made.layers[0].norm.weight, model.layers[0].norm.weight)
