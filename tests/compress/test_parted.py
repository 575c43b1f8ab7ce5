"""Layers that share inputs in one call and not in the next, and weights with two uses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.capture import Capture


class Attends(nn.Module):
    """Query and key of one tensor, or of two; `again` repeats that in one call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, c: Tensor | None = None, again: Tensor | None = None) -> Tensor:
        found = self.q(x) + self.k(x if c is None else c)
        return found if again is None else found + self.k(again)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attends(), Attends()])

    def forward(self, x: Tensor, c: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, c)
        return x


def batches(case: str) -> list[tuple[Any, ...]]:
    torch.manual_seed(1)
    x, c = torch.randn(64, 64), torch.randn(64, 64) * 100
    return {
        "self then cross": [(x,), (x.clone(), c)],
        "cross then self": [(x, c), (x.clone(),)],
        "both in one call": [(x, None, c)],
        "one of them twice": [(x,), (x.clone(), None, c)],
        "always together": [(x,), (x * 2,)],
    }[case]


@pytest.mark.parametrize(
    ("model", "case"),
    [
        *((Attends, case) for case in ("self then cross", "cross then self", "both in one call")),
        *((Blocks, case) for case in ("self then cross", "cross then self")),
    ],
)
def test_each_layer_is_calibrated_by_its_own_inputs(model: Any, case: str) -> None:
    data = batches(case)
    made = lz.quantize_(
        model(),
        lz.Int8WeightActivation(activations="tensor", smooth=None),
        data=data,
        objective="size",
    )
    first = made if model is Attends else made.layers[0]
    vast = max(float(c.abs().max()) for _, *more in data for c in more if c is not None)
    assert float(first.q.input_scale) == pytest.approx(float(data[0][0].abs().max()) / 127)
    assert float(first.k.input_scale) == pytest.approx(vast / 127)


@pytest.mark.parametrize(
    "case", ["self then cross", "cross then self", "one of them twice", "always together"]
)
def test_second_orders_are_those_of_a_layer_by_itself(case: str) -> None:
    """GPTQ gives each layer the codes that it gets where it is quantized alone."""
    scheme = lz.Int4Weight(group=32, method="gptq")
    together = lz.quantize_(Attends(), scheme, data=batches(case), objective="size")
    for name in ("q", "k"):
        alone = lz.quantize_(
            Attends(), scheme, data=batches(case), objective="size", filter=name
        ).get_submodule(name)
        found = together.get_submodule(name)
        assert torch.equal(found.weight.decode(torch.float32), alone.weight.decode(torch.float32))


class Sometimes(Attends):
    """A third reader of a norm's outputs, which only some batches reach."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.norm, self.g, self.apart = nn.LayerNorm(64), nn.Linear(64, 64), apart
        with torch.no_grad():
            self.norm.weight[:4] *= 40

    def forward(self, x: Tensor, c: Tensor | None = None, again: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        found = self.q(x) + self.k(x)
        if self.apart and c is not None:
            return found + self.g(c)
        return found if c is not None else found + self.g(x)


@pytest.mark.parametrize("apart", [False, True])
def test_layers_that_agree_stay_together(apart: bool) -> None:
    """Where a third one is not called, or is given something else: SmoothQuant scales for both."""
    torch.manual_seed(3)
    data = [(torch.randn(64, 64),), (torch.randn(64, 64), torch.randn(64, 64))]
    names = ["q", "k"] if apart else ["q", "k", "g"]
    records: list[Any] = []
    real = Capture.__init__

    def noted(self: Capture, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        records.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Capture, "__init__", noted)
        lz.quantize_(
            Sometimes(apart),
            lz.Int8WeightActivation(),
            data=data,
            objective="size",
            filter=["q", "k", "g"],
        )
    inputs = records[-1].inputs
    assert len({id(inputs[name]) for name in names}) == 1
    assert (inputs["g"] is inputs["q"]) != apart
    assert len(records) == 1 + apart


class Tied(nn.Module):
    """A vocabulary that is looked up and multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(192, 128)
        self.mix = nn.Linear(128, 128)
        self.head = nn.Linear(128, 192, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


@pytest.mark.parametrize(("count", "few"), [(8, True), (400, True), (2000, False)])
def test_few_inputs_of_a_head_say_nothing_of_what_is_looked_up(count: int, few: bool) -> None:
    """Of a weight that is both GPTQ would fit those few, and round all lookups worse."""
    torch.manual_seed(2)
    tokens = torch.randint(0, 192, (count,))

    def made(method: str) -> nn.Module:
        scheme = lz.Int4Weight(group=64, method=method, vocabulary="int4")
        return lz.quantize_(Tied(), scheme, data=tokens, objective="size")

    found, nearest = made("gptq"), made("nearest")
    rows = Tied().embed.weight[tokens]
    assert torch.equal(found.embed(tokens), nearest.embed(tokens)) == few
    if few:
        error = (found.embed(tokens) - rows).norm() / rows.norm()
        assert error < 0.11
    assert not torch.equal(found.mix.weight.decode(), nearest.mix.weight.decode())


class OneIsCalled(nn.Module):
    """Two heads of one weight, of which only the second is called."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.idle.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize(
    "whole", [OneIsCalled, lambda: nn.Sequential(OneIsCalled(), OneIsCalled())]
)
def test_of_layers_of_one_weight_that_one_counts_which_data_comes_through(whole: Any) -> None:
    torch.manual_seed(0)
    model, data = whole(), torch.randn(512, 64) @ torch.randn(64, 64)
    gptq, nearest = (
        lz.quantize_(copy.deepcopy(model), scheme, data=data, objective="size")
        for scheme in (lz.Int4Weight(group=32, method="gptq"), lz.Int4Weight(group=32))
    )
    wanted = model(data)
    assert (gptq(data) - wanted).norm() < 0.8 * (nearest(data) - wanted).norm()
