"""A model that was quantized and taken back has nothing that it did not have before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize.modules import quantized_layers
from lezero.core import ledger
from tests.compress.test_input_rounding import Wide, wide

CONTAINERS = ("_parameters", "_buffers", "_modules")


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same"), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, bias=False),
        nn.Flatten(), nn.Linear(36, 64), nn.Linear(64, 32, bias=False),
    ).eval()  # fmt: skip


def words() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(128, 64, padding_idx=3), nn.Linear(64, 64)).train()


def held(model: nn.Module) -> dict[str, Any]:
    """All that each module has: of tensors the names, the rest as it is."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = vars(module) | {key: list(vars(module)[key]) for key in CONTAINERS}
        found[name] = (type(module), own)
    return found


def state(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {key: (x.dtype, x.shape) for key, x in model.state_dict().items()}


def check_nothing_left(model: nn.Module, before: nn.Module) -> None:
    """`model` is quantized; `before`: one of its kind that never was."""
    assert lz.dequantize_(model) is model
    assert not quantized_layers(model)
    assert list(state(model).items()) == list(state(before).items())
    assert [name for name, _ in model.named_buffers()] == []
    assert held(model) == held(before)
    assert ledger.applied(model) == ()
    with pytest.raises(lz.OrderError, match=r"has no quantization report; call lz\.quantize_"):
        lz.quantization_report(model)
    with pytest.raises(lz.OrderError, match="no layer of this model is quantized"):
        lz.dequantize_(model)


def test_scales_of_inputs_do_not_stay() -> None:
    model = images()
    scheme = lz.Int8WeightActivation(activations="tensor")
    lz.quantize_(model, scheme, data=torch.rand(4, 3, 8, 8), objective="size")
    inputs = {key for key in model.state_dict() if ".input_" in key}
    scales = {f"{name}.input_scale" for name in "0245"}
    assert inputs == scales | {"0.input_zero", "2.input_zero"}
    check_nothing_left(model, images())


def test_bits_and_blocks_of_inputs_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = wide(monkeypatch)
    assert (model.third.x_bits, model.third.x_block) == (8, 32)
    check_nothing_left(model, Wide().eval())


SCHEMES = [
    lz.Int8Weight(group=32, zero_point=True),
    lz.Int4Weight(group=32, activations="token", vocabulary="int4"),
    lz.Fp8(activations="token"),
    lz.Nf4(group=32),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: type(scheme).__name__)
def test_scales_of_weights_do_not_stay(scheme: Any) -> None:
    model = words()
    lz.quantize_(model, scheme, objective="size")
    assert set(quantized_layers(model)) == {"0", "1"}
    check_nothing_left(model, words())


def test_layers_of_transformers_have_what_they_had() -> None:
    kind = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(kind(32, 64), kind(64, 32))
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    check_nothing_left(model, nn.Sequential(kind(32, 64), kind(64, 32)))


def test_it_can_be_quantized_again_as_at_first() -> None:
    model, x = images(), torch.rand(4, 3, 8, 8)
    scheme = lz.Int8WeightActivation(activations="tensor", smooth=None)
    states = []
    for _ in range(2):
        lz.quantize_(model, scheme, data=x, objective="size")
        states.append(state(model))
        lz.dequantize_(model)
    assert states[0] == states[1]


def test_what_was_noted_of_a_part_does_not_stay() -> None:
    model = nn.Sequential(words(), words())
    lz.quantize_(model[0], lz.Int8Weight(), objective="size")
    lz.dequantize_(model)
    assert ledger.applied(model[0]) == ()
    with pytest.raises(lz.OrderError, match="has no quantization report"):
        lz.quantization_report(model[0])


def test_a_layer_with_a_name_of_a_quantized_one_stays_as_it_is() -> None:
    taken, buffered, named = (nn.Linear(64, 64) for _ in range(3))
    buffered.register_buffer("input_scale", torch.tensor(3.0))
    named.x_bits = 4
    model = nn.Sequential(taken, buffered, named)
    keys = list(model.state_dict())
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    assert [type(layer) is nn.Linear for layer in model] == [False, True, True]
    lz.dequantize_(model)
    assert list(model.state_dict()) == keys
    assert (float(buffered.input_scale), named.x_bits) == (3.0, 4)


def test_names_that_only_classes_have_are_kept_too() -> None:
    """What a layer registers comes before what its class has, or after it."""
    kind = pytest.importorskip("transformers.pytorch_utils").Conv1D
    hooked, sized, fit = nn.Linear(64, 64), kind(64, 64), nn.Linear(64, 64)
    biased = nn.Embedding(64, 64)
    hooked.register_buffer("W_q", torch.full((64,), 2.0))
    hooked.register_forward_hook(lambda layer, _, y: y * layer.W_q)
    sized.in_features = 3
    biased.bias = nn.Parameter(torch.ones(64))
    model = nn.Sequential(biased, hooked, sized, fit)
    keys = list(model.state_dict())
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    assert [type(layer).__name__ for layer in model] == [
        *("Embedding", "Linear", "Conv1D"),
        "QuantizedLinear",
    ]
    model(torch.zeros(1, dtype=torch.int64))
    told = str(lz.quantization_report(model))
    for name in ("Linear.weight beside its own W_q", "own in_features", "own bias"):
        assert name in told
    lz.dequantize_(model)
    assert list(model.state_dict()) == keys
    assert sized.in_features == 3


def test_the_name_that_keeps_all_layers_back_is_told() -> None:
    layer = nn.Linear(64, 64)
    layer.give_back = 3
    with pytest.raises(lz.ConfigError, match=r"quantized layers have too \('0' has give_back\)"):
        lz.quantize_(nn.Sequential(layer), lz.Int8Weight(), objective="size")
