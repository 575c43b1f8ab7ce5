"""Batch norms become part of convolutions only where no one else reads those, in any batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import speed
from lezero.compress.quantize.batch_norm import FoldedBatchNorm, fold_batch_norms_
from lezero.compress.quantize.journal import Journal
from lezero.compress.quantize.layout import describe, rebuild_
from lezero.compress.quantize.spill import Spill
from tests.compress.test_folds import Opaque, quantized
from tests.compress.test_quantize import difference


class ReadsConvolution(nn.Module):
    """Positive inputs see only the batch norm; others the convolution by itself as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.norm.running_var.fill_(4.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.norm(y)
        return z if x.min() >= 0 else z + y


def test_batch_norms_too_are_folded_only_where_every_batch_agrees() -> None:
    torch.manual_seed(0)
    model, x = ReadsConvolution().eval(), torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        for data, folded in (([x, x], True), ([x, -x], False), ([-x, x], False)):
            made = quantized(model, lz.Int8WeightActivation(), data)
            assert isinstance(made.norm, FoldedBatchNorm) is folded
            for batch in data:
                assert difference(made(batch), model(batch)) < 0.05


class Shares(nn.Module):
    """Another convolution, which the calibration data does not reach, has the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(3, 8, 3)
        self.last = nn.Conv2d(8, 8, 1)
        self.other.weight = self.conv.weight
        self.norm.running_var.fill_(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x))) if x.min() >= 0 else self.other(x)


def test_a_convolution_that_shares_its_weight_takes_no_batch_norm() -> None:
    model, x = Shares().eval(), torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        made = quantized(model, lz.Int8WeightActivation(), x)
        assert not isinstance(made.norm, FoldedBatchNorm)
        assert difference(made(-x), model(-x)) < 0.02


class TwoNorms(nn.Module):
    """Two batch norms read one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.one.running_var.fill_(4.0)
        self.two.running_var.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.one(y) + self.two(y)


def test_a_convolution_with_two_batch_norms_takes_neither() -> None:
    model, x = TwoNorms().eval(), torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        made = quantized(model, lz.Int8WeightActivation(), x)
        assert type(made.one) is type(made.two) is nn.BatchNorm2d
        assert difference(made.conv.weight.decode(), model.conv.weight) < 0.01
        assert difference(made(x), model(x)) < 0.02


class Wrapped(ReadsConvolution):
    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(-x.abs()))


def test_batch_norms_stay_where_the_outputs_cannot_be_seen() -> None:
    model, x = Wrapped().eval(), torch.rand(2, 3, 8, 8)
    made = quantized(model, lz.Int8WeightActivation(), x)
    assert not isinstance(made.norm, FoldedBatchNorm)
    assert lz.quantization_report(made).quality_after is None
    with pytest.raises(lz.ConfigError, match="budget: the model's outputs hold no floating-point"):
        lz.quantize_(model, lz.Int8WeightActivation(), data=x, objective="size", budget=0.1)


class Detector(nn.Module):
    """A score between 0 and 1, read off the convolution itself, in one tensor with boxes in
    pixels: what folding does to it is nothing beside those."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.norm.running_var.fill_(4.0)
        self.box, self.score = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        boxes = 640 * torch.sigmoid(self.box(torch.relu(self.norm(y))))
        return torch.cat([boxes, torch.sigmoid(self.score(y))], 1)


class Viewed(Detector):
    """Another reader has a view of the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.norm(y)
        return torch.cat([640 * z.flatten(2), torch.sigmoid(y[:, :1].flatten(2))], 1)


class GivesIt(Detector):
    """The outputs of the convolution are outputs of the model, once the norm has read them."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.norm(y), y


class Tied(Detector):
    """The weight of the convolution decodes, too."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.norm(self.conv(x)))
        score = torch.sigmoid(F.conv_transpose2d(z, self.conv.weight)).mean((1, 2, 3))
        return torch.cat([640 * self.box(z).mean((2, 3)), score[:, None]], 1)


@pytest.mark.parametrize("kind", [Detector, Viewed, GivesIt, Tied])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_reader_counts_however_small_its_part(kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = kind().eval().to(dtype), torch.rand(2, 3, 8, 8, dtype=dtype)
    with torch.no_grad():
        made = quantized(model, lz.Int8WeightActivation(), x)
    assert type(made.norm) is nn.BatchNorm2d


class Residual(nn.Module):
    """Batch norms after each convolution, sums and in-place activations, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.first = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.first(self.one(x)))
        return torch.relu_(self.second(self.two(y)).add_(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_pairs_are_folded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual() for _ in range(3)]).eval().to(dtype)
    data = [torch.rand(2, 8, 8, 8, dtype=dtype) for _ in range(3)]
    with torch.no_grad():
        made = quantized(model, lz.Int8WeightActivation(), data)
    assert sum(isinstance(part, FoldedBatchNorm) for part in made.modules()) == 6


def random_norm(affine: bool) -> nn.BatchNorm2d:
    """Its variances are nothing beside its ε."""
    norm = nn.BatchNorm2d(8, eps=0.5, affine=affine)
    norm.running_mean.normal_()
    norm.running_var.uniform_(1e-6, 1e-4)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_what_is_folded_is_the_equation_with_its_epsilon(bias: bool, affine: bool) -> None:
    torch.manual_seed(0)
    conv, norm, x = nn.Conv2d(3, 8, 3, bias=bias), random_norm(affine), torch.rand(2, 3, 8, 8)
    weight, shift = conv.weight.detach().clone(), torch.zeros(8)
    if conv.bias is not None:
        shift = conv.bias.detach().clone()
    factor, added = 1 / torch.sqrt(norm.running_var + 0.5), torch.zeros(8)
    if affine:
        factor, added = norm.weight.detach() * factor, norm.bias.detach().clone()
    mean, model = norm.running_mean.clone(), nn.Sequential(conv, norm).eval()
    private = {id(parameter) for parameter in model.parameters()}
    with Spill() as spill, torch.no_grad():
        fold_batch_norms_(model, [x], {id(conv)}, private, Journal(spill), spill)
    assert isinstance(norm, FoldedBatchNorm)
    torch.testing.assert_close(conv.weight.detach(), weight * factor.view(-1, 1, 1, 1))
    torch.testing.assert_close(conv.bias.detach(), (shift - mean) * factor + added)


class Normed(nn.Module):
    """Convolutions with and without biases, batch norms of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(3, 8, 3, bias=False), random_norm(affine=True)
        self.second, self.two = nn.Conv2d(8, 8, 3), random_norm(affine=True)
        self.third, self.three = nn.Conv2d(8, 8, 3, bias=False), random_norm(affine=False)
        self.head = nn.Linear(288, 64, bias=False)
        self.two.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(self.first(x)))
        x = self.three(self.third(torch.relu(self.two(self.second(x)))))
        return self.head(x.flatten(1))


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norms_are_such_again_when_the_model_is(
    correct: bool, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So that its class, built anew, takes its values."""
    torch.manual_seed(0)
    model, x = Normed().eval().to(dtype), torch.randn(4, 3, 12, 12, dtype=dtype)
    scheme = lz.Int8WeightActivation(bias_correction=correct, activations="tensor")
    with torch.no_grad():
        made = quantized(model, scheme, x)
        assert sum(isinstance(part, FoldedBatchNorm) for part in made.modules()) == 3
        lz.save_quantized(made, tmp_path / "q")
        opened = lz.load_quantized(tmp_path / "q", copy.deepcopy(model))
        assert torch.equal(opened(x), made(x))
        kept = made(x)
        for part in (made, opened):
            caplog.clear()
            lz.dequantize_(part)
            told = [record.message for record in caplog.records]
            assert ["1 layers keep a bias" in line for line in told] == [True] * correct
            if correct:
                part.head.bias = None
        near = 0.02 if dtype == torch.float32 else 0.04
        assert difference(made(x), kept) < near or correct
        again = Normed().eval().to(dtype)
        again.load_state_dict(made.state_dict())
        assert {type(part) for part in again.modules()} == {type(part) for part in made.modules()}
        assert torch.equal(again(x), made(x))
        assert torch.equal(opened(x), made(x))
        lz.load_quantized(tmp_path / "q", again)
        assert correct or torch.equal(again(x), kept)
        # In training too: scales and shifts are the model's own.
        assert difference(made.train()(x), model.train()(x)) < 2 * near
    frozen = {name for name, parameter in made.named_parameters() if not parameter.requires_grad}
    assert frozen == {"two.weight"}


def test_a_batch_norm_that_leaves_nothing_of_a_channel_stays() -> None:
    """Or dequantized, the channel would have no weight to train."""
    model, x = Normed().eval(), torch.randn(4, 3, 12, 12)
    with torch.no_grad():
        model.one.weight[3], model.two.weight[2] = 0, 1e-36
        made = quantized(model, lz.Int8WeightActivation(), x)
    kept = [type(part) is nn.BatchNorm2d for part in (made.one, made.two, made.three)]
    assert kept == [True, True, False]


def test_batch_norms_in_fp32_behind_convolutions_in_bf16_come_back_as_they_were() -> None:
    """However little they leave of a channel: shifts that bf16 rounds are not divided by that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)).eval().bfloat16()
    model[1].float()
    with torch.no_grad():
        model[1].weight.fill_(1e-6)
        model[1].bias.uniform_(1, 2)
    made = quantized(model, lz.Int8WeightActivation(), torch.randn(2, 3, 8, 8).bfloat16())
    assert isinstance(made[1], FoldedBatchNorm)
    lz.dequantize_(made)
    for name, value in model.state_dict().items():
        if name != "0.weight":
            assert torch.equal(value, made.state_dict()[name]), name
    assert difference(made[0].weight, model[0].weight) < 0.01


def test_a_convolution_that_was_dequantized_first_gets_its_batch_norm_back() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)).eval()
    made = quantized(model, lz.Int8WeightActivation(), torch.randn(2, 3, 8, 8))
    lz.dequantize_(made[0])
    assert isinstance(made[1], FoldedBatchNorm)
    lz.dequantize_(made)
    assert type(made[1]) is nn.BatchNorm2d
    model.load_state_dict(made.state_dict())


def test_a_fold_that_is_taken_back_leaves_nothing() -> None:
    made = quantized(
        ReadsBatchNorm(always=True).eval(), lz.Int8WeightActivation(), torch.randn(2, 3, 8, 8)
    )
    assert vars(made.norm).keys() == vars(nn.BatchNorm2d(8)).keys()


class ReadsBatchNorm(nn.Module):
    """Its inputs take the type of the batch norm's weights; in training these are read as well."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.always = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or self.training:
            x = x.to(self.norm.weight.dtype)
        return self.norm(self.conv(x))


def test_a_batch_norm_whose_attributes_are_read_stays() -> None:
    data = [torch.randn(2, 3, 8, 8)]
    with torch.no_grad():
        model = ReadsBatchNorm(always=True).eval()
        made = quantized(model, lz.Int8WeightActivation(), data)
        assert isinstance(made.norm, nn.BatchNorm2d)
        assert difference(made(data[0]), model(data[0])) < 0.05
        made = quantized(ReadsBatchNorm(always=False).eval(), lz.Int8WeightActivation(), data)
        with pytest.raises(AttributeError, match=r"'weight': .*fold_batch_norm=False"):
            made.train()(data[0])


@pytest.mark.parametrize("objective", ["size", "speed"])
def test_a_norm_with_the_batchs_own_statistics_is_none_to_fold(objective: Any) -> None:
    """Left in training mode on purpose, in a model that answers."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)).eval()
    model[1].train()
    x = torch.randn(4, 3, 8, 8) * 3 + 2
    with torch.no_grad():
        wanted = model(x)
    kept = {name: value.clone() for name, value in model[1].state_dict().items()}
    lz.quantize_(model, lz.Int8WeightActivation(), data=[x], objective=objective)
    told = lz.quantization_report(model).quality_after
    assert (model.training, model[1].training) == (False, True)
    assert all(torch.equal(value, kept[name]) for name, value in model[1].state_dict().items())
    assert told is not None
    with torch.no_grad():
        found = model(x)
    assert (found - wanted).norm() / wanted.norm() < 0.02
    assert told < 0.02


def test_a_budget_of_a_model_that_stays_as_it_was_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.LayerSpeed, "keeps", lambda *_: False)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)).eval()
    model[1].running_mean.normal_()
    x = torch.randn(4, 3, 8, 8)
    lz.quantize_(model, lz.Int8WeightActivation(), data=[x], budget=0)
    assert [layer.form for layer in lz.quantization_report(model).layers] == ["as it was"]


@pytest.mark.parametrize(
    ("into", "said"),
    [("first", "has taken in several"), ("head", "no convolution"), ("", "no convolution")],
)
def test_a_description_of_pairs_that_cannot_be_is_refused(into: str, said: str) -> None:
    made = quantized(Normed().eval(), lz.Int8WeightActivation(), torch.randn(4, 3, 12, 12))
    about, model = describe(made), Normed().eval()
    about["two"]["into"] = into
    with pytest.raises(lz.FileError, match=said):
        rebuild_(model, about)
    assert type(model.first) is nn.Conv2d
