"""Models that are not what their config and weights say: what programs would leave out is refused,
and the number of blocks is that of the blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lezero.core.errors import ConfigError
from lezero.models import Transformer
from lezero.models.transformer import sdpa
from lezero.serve import opening
from lezero.serve.program import Fed, Program
from tests.serve.models import small

TOKENS = [5, 1, 60, 33, 7, 0, 12]


def logits(program: Program) -> Tensor:
    program.reserve(2)
    return program.run([Fed(TOKENS, 0, [0], range(len(TOKENS)))])


class _Added(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class _Named(Transformer):
    """Adds nothing to what is computed."""


@pytest.mark.parametrize("weights", ["auto", "fp32"])
def test_a_model_that_does_more_than_its_weights_say_is_refused(weights: Any) -> None:
    """The engine would leave it out without a word."""
    for spoil in (
        lambda m: m.layers[1].mlp.register_forward_hook(lambda *_: None),
        lambda m: m.layers[1].mlp.register_forward_pre_hook(lambda *_: None),
    ):
        model = small()
        spoil(model)
        with pytest.raises(ConfigError, match=r"model: layers\.1\.mlp has a hook"):
            opening.program_of(model, weights)
    model = small()
    model.layers[0].self_attn.q_proj.__class__ = _Added
    with pytest.raises(ConfigError, match=r"0\.self_attn\.q_proj has the forward of _Added"):
        opening.program_of(model, weights)
    model = small()
    model.norm.forward = lambda x: x
    with pytest.raises(ConfigError, match=r"model: norm has a forward of its own"):
        opening.program_of(model, weights)
    model = small()
    model.__class__ = _Named
    opening.program_of(model, weights)


def _soft(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> Tensor:
    return sdpa(q, k, v, mask=mask, causal=causal)


_SWAPS: dict[str, Any] = {
    r"layers\.1\.self_attn has an attention of its own": lambda m: setattr(
        m.layers[1].self_attn, "attention", _soft
    ),
    "norm has the forward of LayerNorm": lambda m: setattr(m, "norm", nn.LayerNorm(64)),
    r"norm has an eps of 0\.1 beside norm_eps=1e-05": lambda m: setattr(m.norm, "eps", 0.1),
    r"layers\.0\.mlp has the forward of Sequential": lambda m: setattr(
        m.layers[0], "mlp", nn.Sequential(nn.Linear(64, 64))
    ),
    r"q_proj has the forward of Bilinear": lambda m: setattr(
        m.layers[0].self_attn, "q_proj", nn.Bilinear(64, 64, 64)
    ),
    "embed_tokens has a max_norm": lambda m: setattr(m.embed_tokens, "max_norm", 1.0),
}


@pytest.mark.parametrize("weights", ["auto", "fp32"])
@pytest.mark.parametrize("says", _SWAPS)
def test_what_programs_would_compute_otherwise_is_refused(says: str, weights: Any) -> None:
    model = small()
    _SWAPS[says](model)
    with pytest.raises(ConfigError, match=says):
        opening.program_of(model, weights)


def test_a_weight_that_torch_makes_out_of_others_is_read() -> None:
    model = small()
    parametrizations.weight_norm(model.layers[0].self_attn.q_proj)
    exact = model(torch.tensor([TOKENS]))[0]
    torch.testing.assert_close(logits(opening.program_of(model, "fp32")), exact)


@pytest.mark.parametrize("weights", ["auto", "fp32"])
@pytest.mark.parametrize("order", [(0, 1, 1, 0), (1,)])
@torch.no_grad()
def test_a_model_has_as_many_layers_as_blocks(order: tuple[int, ...], weights: Any) -> None:
    model = small()
    model.layers = nn.ModuleList(copy.deepcopy(model.layers[i]) for i in order)
    exact = model(torch.tensor([TOKENS]))[0]
    program = opening.program_of(model, weights)
    assert program.config.layers == len(order)
    assert float((logits(program) - exact).norm() / exact.norm()) < 0.03


def test_a_model_without_blocks_is_refused() -> None:
    model = small()
    model.layers = nn.ModuleList()
    with pytest.raises(ConfigError, match=r"layers: got 0"):
        opening.program_of(model, "auto")
