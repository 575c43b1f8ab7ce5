from typing import Any

import pytest
import torch

from lezero.models import RopeScaling, TransformerConfig
from lezero.models.rope import Rope, frequencies, rotate

SCALINGS: list[dict[str, Any]] = [
    {"kind": "linear", "factor": 4.0},
    {"kind": "dynamic", "factor": 2.0},
    {
        **{"kind": "llama3", "factor": 8.0, "original_context": 16},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    {"kind": "yarn", "factor": 4.0, "original_context": 16},
    {"kind": "yarn", "factor": 4.0, "original_context": 16, "attention_factor": 1.5},
    {
        **{"kind": "yarn", "factor": 8.0, "original_context": 8, "truncate": False},
        **{"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0},
    },
]


def config(scaling: dict[str, Any] | None = None, **change: Any) -> TransformerConfig:
    shape = {"vocab": 8, "dim": 64, "layers": 1, "heads": 2, "context": 64}
    return TransformerConfig(**{**shape, "rope_scaling": scaling, **change})


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=lambda s: s["kind"] if s else "plain")
@pytest.mark.parametrize("length", [10, 100])
def test_frequencies_are_those_of_transformers(scaling: Any, length: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from lezero.models.hf_config import to_hf

    ours = config(scaling)
    theirs = transformers.LlamaConfig.from_dict(to_hf(ours, "float32"))
    found, factor = frequencies(ours, length)
    if scaling is None:
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        wanted, wanted_factor = rotary.compute_default_rope_parameters(theirs)
    else:
        wanted, wanted_factor = ROPE_INIT_FUNCTIONS[scaling["kind"]](theirs, seq_len=length)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert factor == pytest.approx(wanted_factor, rel=1e-12)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rope = Rope(config())
    x = torch.randn(1, 1, 2, 32, generator=torch.Generator().manual_seed(0)).double()
    q, k = x[..., :1, :], x[..., 1:, :]

    def at(t: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(t, *rope.slice(position, position + 1))

    assert torch.allclose(at(q, 9).norm(), q.norm())
    near, far = (at(q, 5) * at(k, 2)).sum(), (at(q, 45) * at(k, 42)).sum()
    assert torch.allclose(near, far, rtol=1e-5)
    assert not torch.allclose(near, (at(q, 5) * at(k, 3)).sum(), rtol=1e-5)


def test_tables_stay_fp32_through_meta_casts_and_moves() -> None:
    wanted = Rope(config()).cos_TP.clone()
    with torch.device("meta"):
        rope = Rope(config())
    assert rope.cos_TP.is_meta
    rope.to_empty(device="cpu").bfloat16().half()
    assert torch.equal(rope.cos_TP, wanted)
    assert list(rope.state_dict()) == []


def test_tables_grow_with_what_is_used() -> None:
    rope = Rope(config(context=1 << 20))
    assert len(rope.cos_TP) == 2048
    before = rope.cos_TP
    rope.ready(5000, before.device)
    assert len(rope.cos_TP) == 8192
    assert torch.equal(rope.cos_TP[:2048], before)


def test_dynamic_scaling_follows_the_length_and_returns() -> None:
    rope = Rope(config({"kind": "dynamic", "factor": 2.0}))
    plain, device = rope.cos_TP, rope.cos_TP.device
    rope.ready(100, device)
    assert len(rope.cos_TP) == 100
    assert not torch.equal(rope.cos_TP[:64], plain)
    rope.ready(10, device)
    assert torch.equal(rope.cos_TP, plain)
    assert RopeScaling(kind="dynamic", factor=2.0).factor == 2.0
