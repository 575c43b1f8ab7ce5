"""FLOPs are counted by formula, on fake tensors, and nothing of the caller's is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

from lezero.core.errors import ConfigError
from lezero.profiler.flops import count_flops


def test_a_linear_layer() -> None:
    layer = nn.Linear(16, 32)
    found = count_flops(layer, torch.randn(8, 16))
    once = 2 * 8 * 16 * 32
    assert (found.forward, found.backward) == (once, once), "the input wants no gradient"
    assert count_flops(layer, torch.randn(8, 16, requires_grad=True)).backward == 2 * once
    assert count_flops(layer, torch.randn(8, 16), backward=False).total == once
    assert found.matmul == found.total
    assert found.attention == 0
    row = found.rows[0]
    assert (row.calls, row.kind) == (1, "matmul")
    assert row.bytes == 4 * (32 + 8 * 16 + 16 * 32 + 8 * 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_on_the_cpu_is_counted(dtype: torch.dtype, causal: bool) -> None:
    q = torch.randn(2, 4, 64, 32, dtype=dtype, requires_grad=True)
    found = count_flops(lambda q: attend(q, q, q, is_causal=causal), q)
    assert found.forward == found.rows[1].flops == 4 * 2 * 4 * 64 * 64 * 32
    assert found.backward == 2.5 * found.forward
    assert found.attention == found.total


def test_attention_with_fewer_key_heads_another_length_and_width() -> None:
    q = torch.randn(1, 4, 8, 16, requires_grad=True)
    k, v = torch.randn(1, 2, 24, 16), torch.randn(1, 2, 24, 16)
    found = count_flops(lambda q: attend(q, k, v, enable_gqa=True), q)
    assert found.forward == 2 * 4 * 8 * 24 * (16 + 16)


def test_attention_without_autograd() -> None:
    q = torch.randn(2, 4, 64, 32)
    with torch.inference_mode():
        found = count_flops(lambda q: attend(q, q, q), q, backward=False)
    assert found.forward == 4 * 2 * 4 * 64 * 64 * 32


def test_a_transformer_layer_agrees_with_counting_by_hand() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    batch, length, dim, ffn = 2, 10, 64, 128
    found = count_flops(layer, torch.randn(batch, length, dim))
    products = 2 * batch * length * (4 * dim * dim + 2 * dim * ffn)
    assert found.forward == products + 4 * batch * length * length * dim
    by_kind = sum(row.flops for row in found.rows if row.phase == "forward")
    assert by_kind == found.forward


def test_nothing_is_touched() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout())
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    drawn = torch.get_rng_state()
    found = count_flops(model, x)
    assert found.forward == 2 * 2 * 8 * 14 * 14 * 27
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not torch.equal(state, drawn)


def test_no_memory_is_needed() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)
    x = torch.empty(4096, 1 << 20, device="meta")
    assert count_flops(model, x, backward=False).total == 2 * 4096 * 2**40


def test_autocast_is_followed() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = count_flops(layer, x)
    row = next(row for row in found.rows if row.kind == "matmul" and row.phase == "forward")
    assert row.bytes == 2 * (32 + 8 * 16 + 16 * 32 + 8 * 32)


def test_a_result_that_cannot_be_differentiated_and_one_of_several() -> None:
    assert count_flops(torch.mm, torch.ones(2, 3), torch.ones(3, 4)).backward == 0
    layer = nn.Linear(4, 4)
    found = count_flops(lambda x: {"a": layer(x), "b": [layer(x)]}, torch.ones(2, 4))
    assert found.backward == found.forward


def test_a_function_that_needs_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensors without numbers"):
        count_flops(lambda x: x if x.sum().item() > 0 else -x, torch.ones(3))
    with pytest.raises(ConfigError, match="FLOPs not counted"):
        count_flops(torch.mm, torch.ones(2, 3), torch.ones(2, 3))


def test_the_table() -> None:
    text = count_flops(nn.Linear(16, 32), torch.randn(8, 16)).table()
    assert "aten.addmm.default" in text
    assert "backward" in text
    assert text.splitlines()[-1].startswith("all")


class Frozen(dict[str, int]):
    """As the configs of diffusers' models are."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("frozen")


class Moving(nn.Module):
    """Assigns a buffer, an attribute and an item of a cache in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Frozen(width=4)
        self.layer, self.cache = nn.Linear(4, 4), dict[str, torch.Tensor]()
        self.register_buffer("center", torch.zeros(4))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.cache["x"] = self.layer(x)
        self.center = 0.9 * self.center + 0.1 * self.last.mean(0).detach()
        return self.last


@pytest.mark.parametrize("step", [False, True])
def test_what_a_function_assigns_is_taken_back(step: bool) -> None:
    model = Moving()
    optimizer = torch.optim.AdamW(model.parameters())
    center, weight = model.center, model.layer.weight.detach().clone()

    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    found = count_flops(train, torch.ones(2, 4)) if step else count_flops(model, torch.ones(2, 4))
    assert found.total > 0
    assert model.center is center
    assert (model.last, model.cache, model.layer.weight.grad) == (None, {}, None)
    assert model.config == {"width": 4}
    assert not optimizer.state
    assert torch.equal(model.layer.weight, weight)
