"""A method that has no layers to work on says so, and only fields that would help are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import speed


class OwnLinear(nn.Linear):
    """As transformers' `FalconLinear`: nothing that `nn.Linear` does not do."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class Tied(nn.Module):
    """An embedding, which is the head too, around linear layers of a class."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(96, 64)
        self.layers = nn.ModuleList(kind(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def ids() -> list[Tensor]:
    return [torch.randint(0, 96, (2, 12)) for _ in range(4)]


def int4(method: str, **more: Any) -> lz.Int4Weight:
    return lz.Int4Weight(group=32, method=method, **more)


FOUND = (
    "no linear layer was found but the vocabulary's; in no layer that can be quantized: 67% of "
    "weights (OwnLinear.weight 12,288). Subclasses of Linear (OwnLinear) stay as they are"
)


@pytest.mark.parametrize("objective", ["size", "speed"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_method_that_finds_the_vocabulary_alone_says_why(
    method: str, objective: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed.LayerSpeed, "measure", lambda *given: (1.0, 2.0))
    model = Tied(OwnLinear)
    lz.quantize_(model, int4(method), data=ids(), objective=objective)
    report = lz.quantization_report(model)
    assert [note for note in report.notes if f"method '{method}': {FOUND}" in note]
    assert [layer.name for layer in report.layers] == ["embed"]
    assert report.layers[0].quantized == (objective == "size")


@pytest.mark.parametrize("method", ["nearest", "gptq", "awq", "hqq"])
def test_with_the_class_that_the_note_names_they_are_taken(method: str) -> None:
    model, x = Tied(OwnLinear), ids()
    wanted = model(x[0])
    for layer in model.layers:
        layer.__class__ = nn.Linear
    torch.testing.assert_close(model(x[0]), wanted)
    lz.quantize_(model, int4(method), data=x, objective="size")
    report = lz.quantization_report(model)
    assert len(report.layers) == 4
    assert not [note for note in report.notes if "method" in note]


def test_nothing_is_noted_of_what_nobody_asked_for() -> None:
    for config, filter in ((int4("nearest"), None), (int4("gptq"), ["embed", "head"])):
        model = Tied(OwnLinear)
        lz.quantize_(model, config, data=ids(), objective="size", filter=filter)
        assert not [x for x in lz.quantization_report(model).notes if "no linear layer" in x]


def test_classes_of_torch_are_not_named() -> None:
    model = nn.Sequential(nn.Embedding(40, 64), nn.MultiheadAttention(64, 2))
    lz.quantize_(model, lz.Int8Weight(method="hqq", zero_point=True), objective="size")
    (note,) = lz.quantization_report(model).notes
    assert note.startswith("method 'hqq': no linear layer was found; in no layer that can be")
    assert "Subclasses" not in note


ZEROS, INT4 = "zero_point=True", "vocabulary='int4'"
REFUSED = {
    "subclasses": (lambda: Tied(OwnLinear), int4("hqq"), None, f"{FOUND}.*With {INT4} it can"),
    "subclasses, no zeros": (
        *(lambda: Tied(OwnLinear), int4("hqq", zero_point=False), None),
        f"{FOUND}.*With {ZEROS} and {INT4} it can work on what was found",
    ),
    "subclasses and a filter": (
        *(lambda: Tied(OwnLinear), int4("hqq"), "*"),
        rf"found but the vocabulary's\. Subclasses of Linear \(OwnLinear\).*With {INT4}",
    ),
    "no zeros": (
        *(lambda: Tied(nn.Linear), int4("hqq", zero_point=False), None),
        rf"of these layers\. Give {ZEROS}, or take another method",
    ),
    "a group that does not divide": (
        *(lambda: nn.Sequential(nn.Embedding(40, 48), nn.Linear(48, 40)), int4("hqq"), None),
        r"no linear layer was found but the vocabulary's\. Take another method",
    ),
    "convolutions": (
        *(lambda: nn.Sequential(nn.Conv2d(3, 16, 3)), lz.Int8Weight(method="hqq"), None),
        r"no linear layer was found\. Take another method",
    ),
    "no field for zeros": (
        *(lambda: nn.Sequential(nn.Linear(64, 64)), lz.Int8WeightActivation(method="hqq"), None),
        r"Take another method; 'hqq' needs zero points: lz.Int8Weight\(zero_point=True\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_help_is_named_and_nothing_else(name: str) -> None:
    make, config, filter, words = REFUSED[name]
    words = words.replace(FOUND, FOUND.replace("(", r"\(").replace(")", r"\)"))
    with pytest.raises(lz.ConfigError, match=f"method: 'hqq' cannot work on .*{words}") as refused:
        lz.quantize_(make(), config, objective="size", filter=filter)
    for field in (ZEROS, INT4):
        assert (field in str(refused.value)) == (field in words.replace(r"\(", "("))


def test_what_is_named_helps() -> None:
    model = Tied(OwnLinear)
    lz.quantize_(model, int4("hqq", vocabulary="int4"), objective="size")
    (layer,) = lz.quantization_report(model).layers
    assert layer.form == "int4 g32"


class Adapted(nn.Module):
    """A linear layer with an adapter, as `peft` has it."""

    def __init__(self, merged: list[str]) -> None:
        super().__init__()
        self.base_layer, self.merged_adapters = nn.Linear(64, 64), merged

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


@pytest.mark.parametrize("pattern", [None, "*base_layer", "1.*"])
def test_merged_adapters_are_told(pattern: str | None) -> None:
    model = nn.Sequential(Adapted(["default"]), Adapted([]))
    lz.quantize_(model, lz.Int8Weight(), objective="size", filter=pattern)
    text = str(lz.quantization_report(model))
    assert ("adapters are merged into the weights of 0, and stay so" in text) is (pattern != "1.*")
    layer = model[1].base_layer
    assert hasattr(layer, "W_q")  # how `peft` asks whether there is a dequantize()
    assert torch.equal(layer.dequantize(), layer.weight.decode())
