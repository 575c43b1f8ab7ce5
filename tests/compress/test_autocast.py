"""Mixed precision by torch.autocast, around the verb and inside of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.modules import quantized_layers
from tests.compress.test_quantize import difference, small, tokens

AWQ = lz.Int4Weight(group=32, method="awq", scales="minmax")


@pytest.mark.parametrize("scheme", [lz.Int8WeightActivation(), AWQ])
def test_autocast_around_the_verb_hides_no_trial(scheme: Any) -> None:
    model = small()
    made, data = copy.deepcopy(model), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        lz.quantize_(made, scheme, data=data, objective="size")
        assert torch.is_autocast_cache_enabled()
    with torch.no_grad():
        assert difference(made(data[0]), model(data[0])) < 0.15


class Mixed(nn.Module):
    """Computes in bf16 by itself, but for its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.image = nn.Conv1d(1, 4, 3)
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(F.relu(self.first(x)))
            x = x + self.image(x[:, None]).mean((1, 2), keepdim=True)[..., 0]
            with torch.autocast("cpu", enabled=False):
                return self.last(x.float())


@pytest.mark.parametrize("objective", ["size", "speed"])
@pytest.mark.parametrize(
    "scheme",
    [lz.Int8WeightActivation(), lz.Int8Weight(bias_correction=True), lz.Fp8()],
    ids=["w8a8", "w8", "fp8"],
)
def test_a_model_that_computes_under_autocast(scheme: Any, objective: Any) -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(16, 64)
    with torch.no_grad():
        wanted = model(x)
        lz.quantize_(model, scheme, data=x, objective=objective)
        assert difference(model(x), wanted) < 0.06
        if objective == "size":
            assert all(layer.quantized for layer in lz.quantization_report(model).layers)
        for outside in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                again = lz.quantize_(Mixed().eval(), scheme, data=x, objective=objective)
                assert again(x).isfinite().all()


class Routed(nn.Module):
    """Adds rows into a buffer of autocast's type, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.image = nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        total = torch.zeros(len(x), 64, dtype=kind)
        total.index_add_(0, torch.arange(len(x)), self.inner(x))
        total = total + F.linear(x, self.inner.weight, self.inner.bias)
        return total + self.image(x[:, None]).mean((1, 2), keepdim=True)[..., 0]


SCHEMES = pytest.mark.parametrize(
    "scheme",
    [
        lz.Int8Weight(),
        lz.Int8WeightActivation(),
        lz.Int4Weight(),
        lz.Fp8(),
        lz.Fp8(activations="token"),
        lz.Nf4(),
    ],
)


@SCHEMES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_give_the_type_of_autocast(scheme: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Routed().eval(), torch.randn(16, 64)
    with torch.no_grad():
        wanted = model(x)
        lz.quantize_(model, scheme, data=x, objective="size")
        assert model(x).dtype == torch.float32
        with torch.autocast("cpu", dtype):
            found = model(x)
            inner, image = model.inner(x), model.image(x[:, None])
    assert found.dtype == inner.dtype == image.dtype == dtype
    assert difference(found.float(), wanted) < 0.2


@SCHEMES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_in_fp32_take_16_bits_as_fp32(scheme: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Routed().eval(), torch.randn(16, 64).to(dtype)
    lz.quantize_(model, scheme, data=x.float(), objective="size")
    uses: list[tuple[Any, Tensor]] = [(model.inner, x)]
    uses.append((lambda x: F.linear(x, model.inner.weight), x))
    if "image" in quantized_layers(model):
        uses.append((model.image, x[:, None]))
    with torch.no_grad():
        for use, given in uses:
            assert torch.equal(use(given), use(given.float()))
        model.to(dtype)
        assert all(use(given).dtype == dtype for use, given in uses)


@SCHEMES
def test_compiled_and_exported_layers_do_too(scheme: Any) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = Routed().eval(), torch.randn(16, 64)
    lz.quantize_(model, scheme, data=x, objective="size")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain = compiled(x)
        with torch.autocast("cpu", torch.bfloat16):
            wanted, found = model(x), compiled(x)
            exported = torch.export.export(model, (x,)).module()(x)
    assert plain.dtype == torch.float32
    assert found.dtype == exported.dtype == torch.bfloat16
    assert torch.allclose(found, wanted, atol=0.05)
    assert torch.allclose(exported, wanted, atol=0.05)
