from typing import Any

import numpy as np
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


def longrope(pairs: int, **change: Any) -> dict[str, Any]:
    """Up to 16 tokens short divisors, beyond them long ones; all of them different."""
    short, long = ([start + step * i for i in range(pairs)] for start, step in ((1, 0.1), (2, 0.5)))
    given = {"kind": "longrope", "factor": 4.0, "original_context": 16}
    return {**given, "short_factor": short, "long_factor": long, **change}


def config(scaling: dict[str, Any] | None = None, **change: Any) -> TransformerConfig:
    shape = {"vocab": 8, "dim": 64, "layers": 1, "heads": 2, "context": 64}
    return TransformerConfig(**{**shape, "rope_scaling": scaling, **change})


LONG = [longrope(16), longrope(16, factor=1.0), longrope(16, factor=7.0, attention_factor=1.5)]


@pytest.mark.parametrize(
    "scaling", [None, *SCALINGS, *LONG], ids=lambda s: s["kind"] if s else "plain"
)
@pytest.mark.parametrize("length", [10, 16, 17, 100])
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


@pytest.mark.parametrize("scaling", [{"kind": "dynamic", "factor": 2.0}, longrope(16)])
def test_angles_that_depend_on_the_length_follow_it_and_return(scaling: dict[str, Any]) -> None:
    rope = Rope(config(scaling))
    steady = rope.config.steady
    assert steady == (64 if scaling["kind"] == "dynamic" else 16)
    plain, device = rope.cos_TP[:steady].clone(), rope.cos_TP.device
    rope.ready(steady + 1, device)
    beyond = rope.cos_TP[: steady + 1].clone()
    assert not torch.equal(beyond[:steady], plain)
    rope.ready(steady + 8, device)
    assert len(rope.cos_TP) >= steady + 8
    assert torch.equal(rope.cos_TP[: steady + 1], beyond) == (scaling["kind"] == "longrope")
    assert len(rope.double().cos_TP) >= steady + 8  # computed afresh, for the same length
    rope.ready(10, device)
    assert torch.equal(rope.cos_TP[:steady], plain)
    assert RopeScaling(kind="dynamic", factor=2.0).factor == 2.0


def test_equal_angles_have_equal_numbers() -> None:
    plain, dynamic, long = (config(s) for s in (None, {"kind": "dynamic", "factor": 2.0}, LONG[0]))
    assert len({plain.angles(length) for length in (1, 16, 17, 64)}) == 1
    assert [dynamic.angles(length) for length in (1, 64, 65, 66)] == [64, 64, 65, 66]
    assert [long.angles(length) for length in (1, 16, 17, 64)] == [16, 16, 17, 17]
    assert (plain.longest, dynamic.longest, long.longest) == (64, 128, 64)
    inside = config(longrope(16, original_context=100))
    assert inside.steady == inside.longest == 64


def test_tables_are_exact_to_the_last_bits() -> None:
    """NumPy in fp64 as the reference: torch's first cosine of a process may be off by 1.5e-4."""
    config = TransformerConfig(vocab=16, dim=64, layers=1, heads=1, context=2048)
    rope = Rope(config)
    rope.ready(2048, torch.device("cpu"))
    angle_P, _ = frequencies(config, config.angles(0))
    angles = (torch.arange(2048, dtype=torch.float32)[:, None] * angle_P).double().numpy()
    assert abs(rope.cos_TP.numpy() - np.cos(angles)).max() < 1e-7
    assert abs(rope.sin_TP.numpy() - np.sin(angles)).max() < 1e-7
    assert rope.cos_TP.is_contiguous()
