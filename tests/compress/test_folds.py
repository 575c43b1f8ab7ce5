"""Channels are scaled between two layers of a block only, and only where every batch agrees."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.modules import quantized_layers
from lezero.compress.quantize.speed import LayerSpeed
from tests.compress.test_quantize import difference, small, tokens

AWQ = lz.Int4Weight(group=32, method="awq", scales="minmax")
SMOOTH = lz.Int8WeightActivation(smooth=0.5)


def quantized(model: nn.Module, scheme: Any, data: Any) -> nn.Module:
    return lz.quantize_(copy.deepcopy(model), scheme, data=data, objective="size")


def uneven(norm: nn.Module) -> None:
    norm.weight.data.normal_().exp_()


class Block(nn.Module):
    """A norm before a linear layer, with uneven channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        uneven(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(self.norm(x))) + self.two(x)


class Branches(Block):
    """Large inputs reach something else that reads the norm."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        more = 5 * h if x.abs().max() > 10 else 0
        return torch.tanh(self.one(h)) + more


class Experts(Block):
    """Which layer is called is told by the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.one if x[0, 0] > 0 else self.two
        return x + layer(self.norm(x)).tanh()


class InPlace(Block):
    """Gives out the tensor it was given; the norm has two readers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x.add_(self.one(h)).add_(h)


class Clipped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.nn.functional.relu6(self.one(x)))


class Two(nn.Module):
    """Two blocks of a kind."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return second(first(x.clone()))


def scaled(before: nn.Module, after: nn.Module) -> bool:
    """Whether the first block's norm was folded."""
    return scaled_at(before, after, 0)


def scaled_at(before: nn.Module, after: nn.Module, index: int) -> bool:
    one, two = (model.blocks[index].norm.weight for model in (before, after))
    return not torch.equal(one, two)


@pytest.mark.parametrize(
    "scheme",
    [AWQ, lz.Int8Weight(method="awq"), lz.Int8WeightActivation(vocabulary="int8_activations")],
)
def test_the_backbone_of_a_language_model_stays_near(scheme: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 100, (4, 16))
    with torch.no_grad():
        uneven(model.model.norm)
        uneven(model.model.layers[0].input_layernorm)
        hidden, logits = model.model(ids).last_hidden_state, model(ids).logits
        made = quantized(model, scheme, ids)
        assert torch.equal(made.model.norm.weight, model.model.norm.weight)
        ours, theirs = (m.model.layers[0].input_layernorm.weight for m in (made, model))
        assert not torch.equal(ours, theirs)  # in a block it is done
        assert difference(made.model(ids).last_hidden_state, hidden) < 0.1
        assert difference(made(ids).logits, logits) < 0.1
        # Scaled channels stay scaled, in both layers: what the model gives is the same.
        lz.dequantize_(made)
        assert difference(made.model(ids).last_hidden_state, hidden) < 0.1
        assert difference(made(ids).logits, logits) < 0.1


def test_the_backbone_of_an_image_classifier_stays_near() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    model, x = transformers.ViTForImageClassification(config).eval(), torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        uneven(model.vit.layernorm)
        wanted = model.vit(x).last_hidden_state
        made = quantized(model, lz.Int8WeightActivation(), x)
        assert difference(made.vit(x).last_hidden_state, wanted) < 0.05
        lz.dequantize_(made)
        assert difference(made.vit(x).last_hidden_state, wanted) < 0.05


@pytest.mark.parametrize("scheme", [AWQ, lz.Int8WeightActivation(vocabulary="int8_activations")])
def test_the_last_norm_stays_what_embeddings_are_read_from(scheme: Any) -> None:
    model = small()
    uneven(model.norm)
    made = quantized(model, scheme, tokens())
    assert torch.equal(made.norm.weight, model.norm.weight)


@pytest.mark.parametrize("scheme", [AWQ, SMOOTH])
def test_every_batch_has_a_say(scheme: Any) -> None:
    model, x = Two(Branches).eval(), torch.randn(32, 64)
    with torch.no_grad():
        for data, folded in (([x, x], True), ([x, 8 * x], False), ([8 * x, x], False)):
            made = quantized(model, scheme, data)
            assert scaled(model, made) is folded
            for batch in data:
                assert difference(made(batch), model(batch)) < 0.15


def test_a_bend_that_the_first_batch_does_not_reach() -> None:
    model = Two(Clipped).eval()
    low, high = 0.01 * torch.randn(64, 64), 60 * torch.randn(64, 64)
    with torch.no_grad():
        for block in model.blocks:
            block.one.bias.zero_()
        for data, folded in (([low], True), ([low, high], False), ([high, low], False)):
            made = quantized(model, SMOOTH, data)
            ours, theirs = (m.blocks[0].one.weight for m in (made, model))
            error = difference(ours.decode(), theirs)
            assert (error > 0.02) is folded  # else it is only rounded
            for batch in data:
                assert difference(made(batch), model(batch)) < 0.05


def test_a_layer_that_the_first_batch_does_not_reach_is_rounded_as_it_is() -> None:
    model, x = Two(Experts).eval(), torch.randn(8, 64).abs()
    with torch.no_grad():
        for data in ([x], [x, -x], [-x, x]):
            made = quantized(model, AWQ, data)
            assert scaled(model, made) is (len(data) == 1)
            assert difference(made(x), model(x)) < 0.15


def test_a_norm_that_blocks_share_is_left_alone() -> None:
    model, x = Two(Block).eval(), torch.randn(32, 64)
    assert scaled(model, quantized(model, AWQ, x))
    model.blocks[1].norm = model.blocks[0].norm
    assert not scaled(model, quantized(model, AWQ, x))


def test_a_block_that_works_in_place_proves_nothing() -> None:
    model, x = Two(InPlace).eval(), torch.randn(32, 64)
    with torch.no_grad():
        made = quantized(model, AWQ, [x, x])
        assert not scaled(model, made)
        assert difference(made(x), model(x)) < 0.1
    assert "scaled no channels" in str(lz.quantization_report(made))


def test_smoothing_that_finds_nothing_to_scale_says_so() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    for model, data, why in (
        (nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64), "it needs a repeated block"),
        (gpt2, torch.randint(0, 64, (2, 8)), "Conv1D layers are not scaled"),
    ):
        for smooth in (0.5, "auto", None):
            made = quantized(model, lz.Int8WeightActivation(smooth=smooth), data)
            said = f"'smooth' scaled no channels: {why}" in str(lz.quantization_report(made))
            assert said is (smooth is not None)
    report = lz.quantization_report(quantized(gpt2, AWQ, torch.randint(0, 64, (2, 8))))
    assert "'awq' scaled no channels: Conv1D layers are not scaled" in str(report)
    made = quantized(Two(Block).eval(), SMOOTH, torch.randn(8, 64))
    assert "scaled no channels" not in str(lz.quantization_report(made))


class Faint(Block):
    """The norm has a second reader, whose part is small beside one massive token."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + torch.tanh(self.one(h)) + 1e-4 * h


@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smooth"])
def test_a_massive_token_does_not_hide_the_others(scheme: Any) -> None:
    model, x = Two(Faint).eval(), torch.randn(32, 64)
    x[0, 0] = 1e4
    assert not scaled(model, quantized(model, scheme, x))


class Bent(Block):
    """What keeps signs, but not sizes, lies between the layers; no one takes what the norm gave."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smooth"])
def test_in_fp16_too_right_pairs_are_told_from_wrong_ones(scheme: Any) -> None:
    x = torch.randn(32, 64).half()
    right, faint, bent = (Two(kind).half().eval() for kind in (Block, Faint, Bent))
    with torch.no_grad():
        for layer in right.blocks:
            layer.one.weight.mul_(0.1)  # 1/16 of that is below what fp16 has all digits for
        made = quantized(right, scheme, [x, 2 * x])
        assert all(scaled_at(right, made, index) for index in range(2))
        assert difference(made(x).float(), right(x).float()) < 0.15
        assert not scaled(faint, quantized(faint, scheme, x))
        weight = quantized(bent, scheme, x).blocks[0].one.weight.decode()
        assert difference(weight.float(), bent.blocks[0].one.weight.float()) < 0.1


@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smooth"])
def test_layers_that_stay_as_they_were_are_not_scaled(
    scheme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Two(Block).bfloat16().eval(), torch.randn(32, 64).bfloat16()
    first, second = (copy.deepcopy(block.state_dict()) for block in model.blocks)
    slower = [*model.blocks[0].modules()]

    def measured(self: Any, label: str, before: Any, *rest: Any) -> tuple[float, float]:
        return (1.0, 2.0 if before[0] in slower else 0.5)

    monkeypatch.setattr(LayerSpeed, "measure", measured)
    monkeypatch.setattr("lezero.compress.quantize.verb._WHOLE_MARGIN", 1e9)
    lz.quantize_(model, scheme, data=x)
    for name, value in model.blocks[0].state_dict().items():
        assert torch.equal(value, first[name]), name
    assert list(quantized_layers(model)) == ["blocks.1.one", "blocks.1.two"]
    assert not torch.equal(model.blocks[1].norm.weight, second["norm.weight"])


class Gated(nn.Module):
    """A linear layer before another, which alone reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("stays", ["down", "up"])
@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smooth"])
def test_a_layer_that_stays_beside_a_quantized_one_keeps_the_scales_that_the_other_has(
    scheme: Any, stays: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Two(Gated).eval()
    x = torch.randn(32, 64) * torch.where(torch.arange(64) % 16 == 0, 20, 1)

    def keeps(self: Any, name: str, *rest: Any) -> bool:
        return not name.endswith(stays)

    monkeypatch.setattr(LayerSpeed, "keeps", keeps)
    monkeypatch.setattr("lezero.compress.quantize.verb._WHOLE_MARGIN", 1e9)
    made = lz.quantize_(copy.deepcopy(model), scheme, data=x)
    assert len(quantized_layers(made)) == 4
    with torch.no_grad():
        assert difference(made(x), model(x)) < 0.2
    other = made.blocks[0].get_submodule(stays).weight
    assert not torch.equal(other, model.blocks[0].get_submodule(stays).weight)
    notes = [note for note in lz.quantization_report(made).notes if "scaled all the same" in note]
    assert f"blocks.0.{stays}, blocks.1.{stays}" in notes[0]


class Unused(nn.Module):
    """Two branches; the second has no inputs but zeros until it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.one(x) + self.two(y)


def test_inputs_of_zeros_have_no_scale() -> None:
    model, x = Unused().eval(), torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        made = quantized(model, lz.Int8WeightActivation(), (x, torch.zeros_like(x)))
        assert type(made.two) is nn.Conv2d
        assert type(made.one) is not nn.Conv2d
        assert difference(made(x, x), model(x, x)) < 0.02
    assert "nothing but zeros" in str(lz.quantization_report(made))


@dataclass
class Held:
    """What torch's pytree does not look into."""

    x: Tensor


class Opaque:
    """What no one can look into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Handing(nn.Module):
    """Blocks that hand on `kind`; what the norm gives has a second reader, the block's output."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([Block(), Block()])
        for layer in self.layers:
            layer.forward = lambda held, own=layer: self._block(own, held)

    def _block(self, block: Block, held: Any) -> Any:
        h = block.norm(held.x)
        return self.kind(held.x + h + torch.tanh(block.one(h)))

    def forward(self, x: Tensor) -> Tensor:
        held = self.kind(x)
        for layer in self.layers:
            held = layer(held)
        return held.x


@pytest.mark.parametrize("kind", [Held, Opaque])
@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smooth"])
def test_outputs_that_cannot_be_seen_prove_nothing(scheme: Any, kind: Any) -> None:
    torch.manual_seed(0)
    model = Handing(kind)
    data = [torch.randn(16, 64), torch.randn(16, 64)]
    norms = [layer.norm.weight.clone() for layer in model.layers]
    lz.quantize_(model, scheme, data=data, objective="size")
    for layer, before in zip(model.layers, norms, strict=True):
        assert torch.equal(layer.norm.weight, before)
