"""What a model keeps of the sequences it saw fits together after calibration."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.models import Transformer, TransformerConfig
from lezero.models.config import RopeScaling


class Position(nn.Module):
    """A table that grows and a scale, with their length beside them, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))
        self.length, self.seen = 0, list[int]()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.length:
            self.length = len(x)
            self.table = torch.arange(self.length, dtype=torch.float32)[:, None]
            self.scale = torch.full((), 1 / self.length)
        self.seen.append(len(x))
        self.mean += (x.mean() - self.mean) / len(self.seen)
        return self.layer(x + self.table[: len(x)] * self.scale)


def test_a_table_stays_with_its_length() -> None:
    model, x = nn.Sequential(Position()), torch.randn(16, 64)
    lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
    assert model[0].length == len(model[0].table) == 16
    assert (float(model[0].scale), float(model[0].mean)) == (1 / 16, 0)
    assert model(x).shape == x.shape


@pytest.mark.parametrize("seen", [0, 40])
def test_dynamic_angles_of_transformers_are_those_of_the_length(seen: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64,
        num_attention_heads=2, max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )  # fmt: skip
    model, x = transformers.LlamaModel(config).eval(), torch.randint(0, 64, (1, 60))
    if seen:
        model(x[:, :seen])
    given = torch.zeros(1), torch.arange(60)[None]
    wanted, _ = copy.deepcopy(model.rotary_emb)(*given)
    lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
    assert torch.equal(model.rotary_emb(*given)[0], wanted)


SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 4.0,
        "original_context": 16,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_angles_are_those_of_the_length(kind: str) -> None:
    scaling = RopeScaling.parse({"kind": kind, **SCALINGS[kind]}, "scaling")
    shape = {"dim": 64, "layers": 1, "heads": 2, "ffn": 64, "vocab": 64}
    context = 16 if kind == "dynamic" else 64
    config = TransformerConfig(**shape, context=context, rope_scaling=scaling)
    model, x = Transformer(config).eval(), torch.randint(0, 64, (1, 30))
    wanted = copy.deepcopy(model.rope)
    wanted.ready(30, torch.device("cpu"))
    lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")
    model.rope.ready(30, torch.device("cpu"))
    assert torch.equal(model.rope.cos_TP[:30], wanted.cos_TP[:30])
