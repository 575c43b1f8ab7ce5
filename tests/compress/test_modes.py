"""Models made under torch's modes and defaults, and buffers written where torch does not count."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.batch_norm import FoldedBatchNorm
from lezero.compress.quantize.modules import QuantizedLayer
from tests.compress.test_quantize import difference


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.batch_norm = nn.Conv1d(7, 7, 3, padding=1), nn.BatchNorm1d(7)
        self.batch_norm.running_var.fill_(2.0)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.data.add_(1)
        x = self.batch_norm(self.image(x))
        for block in self.blocks:
            x = block(x)
        return x


SCHEMES: dict[str, Any] = {
    "int4": lz.Int4Weight(),
    "awq": lz.Int4Weight(method="awq"),
    "gptq": lz.Int4Weight(method="gptq"),
    "smooth": lz.Int8WeightActivation(smooth=0.5),
    "auto": lz.Int8WeightActivation(),
    "mse": lz.Int8WeightActivation(activations="tensor", observer="mse", scales="mse"),
    "kl": lz.Int8WeightActivation(activations="tensor", observer="kl", scales="kl"),
    "fp8": lz.Fp8(activations="token"),
}


def made(inference: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        return Net().eval(), torch.randn(4, 7, 64)


@pytest.mark.parametrize("name", SCHEMES)
def test_parameters_of_inference_mode_are_quantized_and_given_back(name: str) -> None:
    model, x = made(True)
    plain, y = made(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(lz.NumericsError, match="budget=0"):
        lz.quantize_(model, SCHEMES[name], data=x, objective="size", budget=0.0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.is_inference() for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(x), plain(y))
    lz.quantize_(model, SCHEMES[name], data=x, objective="size")
    lz.quantize_(plain, SCHEMES[name], data=y, objective="size")
    assert isinstance(model.batch_norm, FoldedBatchNorm) is (
        "Activation" in type(SCHEMES[name]).__name__
    )
    with torch.inference_mode():
        assert torch.equal(model(x), plain(y))


def test_what_is_given_back_in_inference_mode_can_be_trained() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(4, 64)
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    with torch.inference_mode():
        lz.dequantize_(model)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_default_type_of_torch_changes_nothing(name: str, dtype: torch.dtype) -> None:
    model, x = made(False)
    other = copy.deepcopy(model)
    lz.quantize_(model, SCHEMES[name], data=x, objective="size")
    torch.set_default_dtype(dtype)
    lz.quantize_(other, SCHEMES[name], data=x, objective="size")
    with torch.no_grad():
        assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("budget", [0.0, None])
def test_buffers_that_are_written_through_data_are_taken_back(
    inference: bool, budget: float | None
) -> None:
    model, x = made(inference)
    model.calls.data.fill_(7.0)
    try:
        lz.quantize_(model, lz.Int8Weight(), data=x, objective="size", budget=budget)
    except lz.NumericsError:
        assert budget == 0
    assert float(model.calls) == 7


class Remembers(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(64, 64), kept

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.parametrize("inside", [False, True])
def test_extra_state_that_is_no_tensor_is_refused_by_name(inside: bool, tmp_path: Path) -> None:
    model: nn.Module = Remembers({"a": 1})
    model = nn.ModuleDict({"part": model}) if inside else model
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    said = "'part._extra_state'" if inside else "'_extra_state'"
    with pytest.raises(lz.ConfigError, match=f"{said} in the state_dict is a dict.*buffer"):
        lz.save_quantized(model, tmp_path / "q")
    assert not list(tmp_path.iterdir())


def test_extra_state_of_a_tensor_is_kept(tmp_path: Path) -> None:
    model = lz.quantize_(Remembers(torch.tensor([3.0])), lz.Int8Weight(), objective="size")
    lz.save_quantized(model, tmp_path / "q")
    found = lz.load_quantized(tmp_path / "q", Remembers(torch.zeros(1)))
    assert torch.equal(found.kept, torch.tensor([3.0]))
    x = torch.randn(2, 64)
    assert difference(found(x), model(x)) == 0


def test_a_metric_may_leave_the_model_in_training_mode() -> None:
    """As code that measures in mid-training does."""

    def rates(model: nn.Module, mode: bool) -> float:
        model.train(mode)
        return 1.0

    states = []
    for mode in (False, True):
        model, x = made(False)
        scheme = lz.Int8WeightActivation(activations="tensor")
        data, metric = [x, x + 1], partial(rates, mode=mode)
        lz.quantize_(model, scheme, data=data, metric=metric, objective="size")
        assert not any(part.training for part in (model, model.batch_norm, model.blocks[0].up))
        states.append(model.state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.parametrize("scheme", [lz.Int8WeightActivation(), lz.Int4Weight(), lz.Fp8(), lz.Nf4()])
def test_a_tracer_that_takes_layers_whole_goes_through(scheme: Any) -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, QuantizedLayer) or super().is_leaf_module(module, name)

    model, x = nn.Sequential(*[Block() for _ in range(2)]).eval(), torch.randn(3, 5, 64)
    lz.quantize_(model, scheme, data=x, objective="size")
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    assert torch.equal(traced(x), model(x))
