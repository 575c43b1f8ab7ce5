"""Which layers are found: vocabularies whatever the filter takes, lazy layers, and those whose
weight something else has too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import lezero as lz
from lezero.compress.quantize.modules import quantized_layers


class Untied(nn.Module):
    """A language model whose head has weights of its own."""

    def __init__(self, kind: type[nn.Embedding]) -> None:
        super().__init__()
        self.words, self.head = kind(96, 64), nn.Linear(64, 96)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 8


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("filter", [None, lambda name, layer: isinstance(layer, nn.Linear)])
def test_a_head_is_known_by_embeddings_that_the_filter_leaves_out(kind: Any, filter: Any) -> None:
    model, ids = Untied(kind).eval(), torch.randint(0, 96, (4, 8))

    def made(scheme: Any) -> nn.Module:
        own = copy.deepcopy(model)
        return lz.quantize_(own, scheme, data=ids, objective="size", filter=filter)

    assert made(lz.Int4Weight(group=32)).head.weight.grid.format == "int8"
    assert "head" not in quantized_layers(made(lz.Int4Weight(group=32, vocabulary="keep")))
    assert made(lz.Int8WeightActivation()).head.x_bits == 16
    assert made(lz.Int8WeightActivation()).layers[0][0].x_bits == 8


@pytest.mark.parametrize(("one", "other"), [("head", "words"), ("words", "head")])
def test_a_filter_that_takes_one_end_of_a_tied_weight_is_told_the_other(
    one: str, other: str
) -> None:
    model = Untied(nn.Embedding)
    model.head.weight = model.words.weight
    said = f"takes '{one}', which shares its weight with '{other}', and leaves '{other}' out"
    with pytest.raises(lz.ConfigError, match=said):
        lz.quantize_(model, lz.Int8Weight(), objective="size", filter=one)
    lz.quantize_(model, lz.Int8Weight(), objective="size", filter=[one, other])


@pytest.mark.parametrize("data", [None, torch.randn(4, 8)])
def test_a_lazy_layer_is_named(data: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.LazyLinear(32))
    with pytest.raises(lz.ConfigError, match=r"'1' has no shape yet; call the model once"):
        lz.quantize_(model, lz.Int8Weight(), data=data)
    model(torch.randn(4, 8))
    lz.quantize_(model, lz.Int8Weight(), data=data, objective="size")


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "bias", 0.5)


def in_a_buffer(layer: nn.Module) -> None:
    bias = layer.bias
    del layer.bias
    layer.register_buffer("bias", bias.detach())


@pytest.mark.parametrize("change", [pruned, in_a_buffer])
@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Int8WeightActivation()])
def test_a_bias_that_is_no_parameter_leaves_its_layer_as_it_was(change: Any, scheme: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(1, 4, 3), nn.Linear(62, 64))
    model.forward = lambda x: model[2](model[1](model[0](x)[:, None]).mean(1))
    x = torch.randn(8, 64)
    change(model[0])
    change(model[1])
    wanted = model[0](x)
    lz.quantize_(model, scheme, data=x, objective="size")
    assert torch.equal(model[0](x), wanted)
    assert [*quantized_layers(model)] == ["2"]
    assert lz.quantization_report(model).left_over == {"Linear.weight": 4096, "Conv1d.weight": 12}


def test_nothing_but_such_layers_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    pruned(model[0])
    with pytest.raises(lz.ConfigError, match=r"no layer fits.*biases that are parameters"):
        lz.quantize_(model, lz.Int8Weight(), objective="size")


class Keeping(nn.Module):
    """Reads the weight of its first layer where it keeps it too."""

    def __init__(self, keep: Any, find: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.find = nn.Linear(64, 64), nn.Linear(64, 64), find
        self.kept = keep(self.one)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) + nn.functional.linear(x, self.find(self.kept))


KEPT = {
    "list": (lambda layer: [layer.weight], lambda kept: kept[0]),
    "set": (lambda layer: {layer.weight}, lambda kept: next(iter(kept))),
    "nested": (lambda layer: {"by name": ([layer.weight], 1)}, lambda kept: kept["by name"][0][0]),
    "hidden module": (lambda layer: [Sharing(layer)], lambda kept: kept[0].inner.weight),
}


class Sharing(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.inner.weight = layer.weight


@pytest.mark.parametrize("data", [None, torch.randn(4, 64)], ids=["no data", "data"])
@pytest.mark.parametrize("how", KEPT)
def test_a_weight_that_the_model_keeps_beside_its_layer_stays(how: str, data: Any) -> None:
    model, x = Keeping(*KEPT[how]), torch.randn(3, 64)
    before = model.one.weight
    wanted = model(x)
    lz.quantize_(model, lz.Int8Weight(), data=data, objective="size")
    assert [*quantized_layers(model)] == ["two"]
    assert model.one.weight is before
    assert torch.allclose(model(x), wanted, atol=0.05)


def test_a_layer_that_the_model_keeps_in_a_list_too_is_quantized() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model.again = {"first": [model[0]], "all": [model]}
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    assert [*quantized_layers(model)] == ["0"]


class Spread(nn.Module):
    """A norm and layers of which some have one value for all, in one place of memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.one, self.two = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm.weight = nn.Parameter(torch.ones(1).expand(64))
        self.two.weight = nn.Parameter(torch.randn(1, 64).expand(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.norm(x)).tanh())


@pytest.mark.parametrize(
    "scheme", [lz.Int8WeightActivation(smooth=0.5), lz.Int4Weight(group=32, method="awq")]
)
def test_what_lies_in_memory_more_than_once_is_neither_quantized_nor_scaled(scheme: Any) -> None:
    model = nn.Sequential(*(Spread() for _ in range(2)))
    before = [(p, p.clone()) for x in model for p in (x.norm.weight, x.two.weight)]
    x = torch.randn(64, 64) * torch.logspace(0, 2, 64)
    lz.quantize_(model, scheme, data=x, objective="size")
    assert [*quantized_layers(model)] == ["0.one", "1.one"]
    for parameter, values in before:
        assert torch.equal(parameter, values)
        assert parameter.stride()[0] == 0


def test_padding_by_a_word_is_padding_by_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding="same", dilation=2), nn.ReLU(),
        nn.Conv2d(32, 32, (5, 1), padding="same"), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding="valid"), nn.Flatten(2), nn.ReLU(),
        nn.Conv1d(32, 32, 3, padding="same"), nn.Conv1d(32, 32, 4, padding="same"),
    ).eval()  # fmt: skip
    x = torch.randn(4, 3, 12, 12)
    for scheme in (lz.Int8Weight(), lz.Int8WeightActivation()):
        made = lz.quantize_(copy.deepcopy(model), scheme, data=x, objective="size")
        assert list(quantized_layers(made)) == ["0", "2", "4", "7"]  # one more at one end: "8"
        with torch.no_grad():
            assert float((made(x) - model(x)).norm() / model(x).norm()) < 0.05
        assert lz.dequantize_(made)[0].padding == "same"


def test_what_a_config_cannot_take_is_told_with_what_can() -> None:
    images = nn.Sequential(nn.Conv2d(3, 8, 3))
    for scheme in (lz.Int4Weight(), lz.Nf4()):
        with pytest.raises(lz.ConfigError, match=r"none of .*\(Conv2d\).*lz.Int8Weight\(\)"):
            lz.quantize_(images, scheme, objective="size")


def test_groups_that_would_divide_are_named():
    with pytest.raises(lz.ConfigError, match=r"the 48 inputs of .*; 3, 4, 6, 8, 12, 16, 24, 48 do"):
        lz.quantize_(nn.Linear(48, 8), lz.Nf4(), objective="size")
    with pytest.raises(lz.ConfigError, match=r"the 48 inputs of .*; no multiple of 32 does"):
        lz.quantize_(nn.Linear(48, 8), lz.Int4Weight(), objective="size")


@pytest.mark.parametrize("scheme", [lz.Fp8, lz.Int8Weight, lz.Int8WeightActivation, lz.Int4Weight])
def test_a_small_embedding_needs_no_groups(scheme: Any) -> None:
    """As T5's position biases: one number a head."""
    blocks = [nn.Sequential(nn.Embedding(32, 8), nn.Linear(64, 64)) for _ in range(2)]
    lz.quantize_(nn.Sequential(*blocks), scheme(group=32), objective="size")
