"""Layers as users have them: with hooks, masks, adapters, and inputs that change in between."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lezero as lz
from lezero.compress.quantize.modules import quantized_layers
from tests.compress.test_quantize import difference, small, tokens

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).eval()


def test_hooks_run_once_and_are_no_error_of_the_layer() -> None:
    model = pair()
    model[0].register_forward_pre_hook(lambda module, args: (3 * args[0] + 1,))
    model[2].register_forward_hook(lambda module, args, output: 5 * output)
    with torch.no_grad():
        wanted = model(X)
        lz.quantize_(model, lz.Int8Weight(), data=X, objective="size")
        assert difference(model(X), wanted) < 0.02
    assert all((layer.error or 1) < 0.02 for layer in lz.quantization_report(model).layers)


def test_what_a_hook_does_does_not_go_into_a_bias() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    model[0].register_forward_hook(lambda module, args, output: 3 * output + 1)
    with torch.no_grad():
        wanted = model(x)
        lz.quantize_(model, lz.Int8Weight(bias_correction=True), data=x, objective="size")
        assert difference(model(x), wanted) < 0.02


def adapted() -> nn.Sequential:
    model = pair()
    layer = model[0]
    layer.register_buffer("mask", torch.arange(96) % 2 / 3)
    layer.register_buffer("seen", torch.zeros(()), persistent=False)
    layer.gain = nn.Parameter(torch.full((96,), 1.5))
    layer.adapter = nn.Linear(64, 96, bias=False)

    def adapt(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * module.mask * module.gain + module.adapter(args[0])

    layer.register_forward_hook(adapt)
    return model


def test_what_hangs_on_a_layer_stays_there(tmp_path: Path) -> None:
    model, plain = adapted(), adapted()
    with torch.no_grad():
        wanted = model(X)
        lz.quantize_(model, lz.Int8Weight(), filter=["0", "2"], data=X, objective="size")
        found = model(X)
        assert set(quantized_layers(model)) == {"0", "2"}
        assert 0 < difference(found, wanted) < 0.02
        assert "0.seen" not in model.state_dict()
        lz.save_quantized(model, tmp_path / "q")
        assert torch.equal(lz.load_quantized(tmp_path / "q", adapted())(X), found)
        half = copy.deepcopy(model).half()
        assert half[0].mask.dtype == torch.float16
        assert half[0].weight.scale.dtype == torch.float32
        lz.dequantize_(model)
        assert difference(model(X), wanted) < 0.02
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("trains", [False, True])
def test_frozen_layers_come_back_frozen(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64)).requires_grad_(trains)
    lz.quantize_(model, lz.Int8Weight(bias_correction=True), data=X, objective="size")
    lz.dequantize_(model)
    parameters = list(model.parameters())
    assert len(parameters) == 4
    assert all(parameter.requires_grad is trains for parameter in parameters)


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (1, 64)])
def test_inputs_of_any_dims_are_taken(shape: tuple[int, ...]) -> None:
    model, x = pair(), torch.randn(shape)
    wanted = model(x)
    lz.quantize_(model, lz.Int8WeightActivation(), data=x, objective="size")
    found = model(x.requires_grad_())
    found.sum().backward()
    assert difference(found.detach(), wanted.detach()) < 0.03


@pytest.mark.parametrize("unbatched", [0, 1, 2])
def test_images_need_no_batch(unbatched: int) -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        torch.randn(3, 9, 9),
    )
    with torch.no_grad():
        wanted = model(x)
        data = [x if index < unbatched else x[None] for index in range(2)]
        scheme = lz.Int8WeightActivation(bias_correction=True)
        lz.quantize_(model, scheme, data=data, objective="size")
        assert model(x).shape == wanted.shape
        assert difference(model(x), wanted) < 0.03
        assert torch.equal(model(x), model(x[None])[0])


def test_batches_of_a_data_loader_are_lists() -> None:
    pairs = TensorDataset(X, torch.randn(16, 3))
    wanted = pair()
    with pytest.raises(lz.ConfigError, match="does not take batch 0"):
        lz.quantize_(wanted, lz.Int8Weight(), data=DataLoader(pairs, 4), objective="size")
    lz.quantize_(
        wanted, lz.Int8Weight(), data=DataLoader(TensorDataset(X), 4), objective="size", budget=0.1
    )


def test_an_encoder_with_a_padding_mask() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 64)
    mask = torch.arange(5) >= torch.tensor([[3], [5]])
    batch = {"src": x, "src_key_padding_mask": mask}
    with torch.no_grad():
        wanted = model(**batch)
        lz.quantize_(model, lz.Int8Weight(), data=[batch], objective="size")
        assert difference(model(**batch)[~mask], wanted[~mask]) < 0.02


class Counts(nn.Module):
    """Counts its calls in a buffer, and keeps its last input in another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        return self.layer(x)


@pytest.mark.parametrize("budget", [None, 0.0])
def test_buffers_are_what_they_were(budget: float | None) -> None:
    model = Counts()
    last = model.last
    try:
        lz.quantize_(model, lz.Int8Weight(), data=X, objective="size", budget=budget)
    except lz.NumericsError:
        assert budget == 0.0
    assert bool(quantized_layers(model)) == (budget is None)
    assert int(model.calls) == 0
    assert model.last is last


class InPlace(nn.Module):
    """Two layers are given one tensor, which is written to in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.one(x)
        return y + self.two(x.relu_())


@pytest.mark.parametrize("inference", [False, True])
def test_inputs_that_change_in_between_are_others(inference: bool) -> None:
    x = (X - 1).detach()
    model = InPlace()
    scheme = lz.Int8WeightActivation(activations="tensor", smooth=None)
    with torch.inference_mode(inference):
        lz.quantize_(model, scheme, data=x, objective="size")
    loss = model(x.requires_grad_()).sum()
    loss.backward()
    assert x.grad is not None
    x = x.detach()
    for layer, wanted in ((model.one, x.abs().max()), (model.two, x.max())):
        assert float(layer.input_scale * 127) == pytest.approx(float(wanted))


class Mixture(nn.Module):
    """The first number of a token says which of three experts gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = x[:, 0] == index
            out[mine] = expert(x[mine])
        return out


STATIC = lz.Int8WeightActivation(activations="tensor")


@pytest.mark.parametrize(
    "scheme",
    [
        lz.Int4Weight(),
        lz.Int4Weight(method="gptq"),
        lz.Int4Weight(method="awq"),
        lz.Int8Weight(bias_correction=True, scales="mse"),
        lz.Int8WeightActivation(scales="mse", observer="kl"),
        STATIC,
    ],
    ids=["mse", "gptq", "awq", "bias", "a8", "static"],
)
def test_an_expert_without_tokens_was_not_reached(scheme: Any) -> None:
    torch.manual_seed(0)
    model, data = Mixture(), [X.clone(), X.clone()]
    data[0][:, 0] = 0
    data[1][:, 0] = torch.arange(16) % 2
    with torch.no_grad():
        wanted = model(data[1])
        lz.quantize_(model, scheme, data=data, objective="size")
        assert difference(model(data[1]), wanted) < 0.2
    one, two, three = lz.quantization_report(model).layers
    assert 0 < (one.error or 0) < 0.2
    assert 0 < (two.error or 0) < 0.2
    said = str(lz.quantization_report(model))
    if scheme is STATIC:
        assert "needs calibration data, and none came through it" in three.reason
        most = data[1][1::2].abs().max()
        assert float(model.experts[1].input_scale * 127) == pytest.approx(float(most))
    else:
        assert three.quantized
        assert "no data was seen to come through experts.2: quantized without it" in said


class Heads(nn.Module):
    """An output head and a value head over the same hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(128, 64), nn.Linear(64, 64)
        self.head, self.value = nn.Linear(64, 128, bias=False), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(self.words(ids))
        return self.head(hidden), self.value(hidden)


def test_a_head_shares_its_inputs_with_a_layer_of_static_activations() -> None:
    model, ids = Heads(), torch.arange(24).view(2, 12)
    hidden = model.body(model.words(ids)).detach()
    scheme = lz.Int8WeightActivation(activations="tensor", smooth=None)
    lz.quantize_(model, scheme, data=ids, objective="size")
    assert model.head.input_scale is None
    assert float(model.value.input_scale * 127) == pytest.approx(float(hidden.abs().max()), rel=0.1)


def test_blocks_that_were_compiled_are_seen_too() -> None:
    model, (data, *_) = small(), tokens(1)
    scheme = lz.Int8WeightActivation(activations="tensor")
    plain = lz.quantize_(copy.deepcopy(model), scheme, data=data, objective="size")
    for block in model.layers:
        block.compile(backend="eager")
    with torch.no_grad():
        model(data)
        lz.quantize_(model, scheme, data=data, objective="size")
        assert torch.equal(model(data), plain(data))


@dataclass(frozen=True)
class Frozen:
    use_cache: bool = True


@dataclass
class Open:
    use_cache: bool = True


@pytest.mark.parametrize("kind", [Frozen, Open])
def test_a_config_that_cannot_be_written_to_is_left_alone(kind: Any) -> None:
    model, seen = pair().train(), []
    model.config = kind()
    model.register_forward_pre_hook(lambda module, args: seen.append(module.config.use_cache))
    lz.quantize_(model, lz.Int8Weight(), data=X, objective="size")
    assert all(used is (kind is Frozen) for used in seen)
    assert model.config.use_cache
    assert model.training


@pytest.mark.parametrize("kind", ["nothing", "kept by a hook", "seen by a hook", "kept by itself"])
def test_a_map_that_somebody_keeps_stays_what_it_was(kind: str) -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            features = self[0](x)
            if kind == "kept by itself":
                self.features = features
            return self[3](self[2](self[1](features)))

    torch.manual_seed(0)
    model = Net(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3)).eval()
    model[1].running_var.uniform_(0.1, 5)
    kept: list[Tensor] = []
    if kind == "kept by a hook":
        model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    if kind == "seen by a hook":
        model[1].register_forward_pre_hook(lambda *_: None)
    lz.quantize_(
        model, lz.Int8WeightActivation(), data=[torch.randn(4, 16, 8, 8)], objective="size"
    )
    assert isinstance(model[1], nn.BatchNorm2d) == (kind != "nothing")


def test_what_a_complex_output_loses_counts() -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.fft.fft(super().forward(x)), x.sum()

    torch.manual_seed(0)
    model = Net(nn.Linear(64, 64))
    with pytest.raises(lz.NumericsError, match="budget"):
        lz.quantize_(model, lz.Int4Weight(group=32), data=[X], objective="size", budget=1e-6)


def test_code_that_asks_for_a_parameter_is_told() -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(next(self.parameters()).dtype))

    model = Net(nn.Linear(64, 64, bias=False)).eval()
    wanted = model(X)
    with pytest.raises(lz.ConfigError, match=r"once it is quantized: StopIteration.*filter="):
        lz.quantize_(model, lz.Int8Weight(), data=[X], objective="size")
    assert torch.equal(model(X), wanted)
