import pytest
import torch

from lezero.core.errors import ConfigError
from lezero.models import (
    PRESETS,
    RopeScaling,
    Transformer,
    TransformerConfig,
    count_parameters,
    preset,
)
from tests.models.test_rope import longrope

SHAPE = {"vocab": 16, "dim": 32, "layers": 1, "heads": 4}


def test_what_is_left_out_is_derived() -> None:
    config = TransformerConfig(vocab=100, dim=512, layers=2, heads=8)
    assert (config.kv_heads, config.head_dim, config.ffn) == (8, 64, 1344)
    assert TransformerConfig.parse(config.to_dict()) == config


def test_what_is_given_is_kept() -> None:
    config = TransformerConfig(**SHAPE, kv_heads=2, head_dim=6, ffn=10)
    assert (config.kv_heads, config.head_dim, config.ffn) == (2, 6, 10)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 5}, r"heads: got 5, which does not divide dim 32"),
        ({"kv_heads": 3}, r"kv_heads: got 3, which does not divide heads 4"),
        ({"head_dim": 7}, r"head_dim: got 7, must be even"),
        ({"vocab": 0}, r"vocab: got 0, allowed is greater than or equal to 1"),
        ({"dim": "wide"}, r"dim: got 'wide'"),
        ({"layers": 10**9}, r"layers: got 1000000000"),
        ({"rope_theta": float("nan")}, r"rope_theta"),
        ({"attention_bias": "some"}, r"attention_bias: got 'some'"),
        ({"head": 4}, r"head: unknown key; did you mean 'heads'"),
        ({"rope_scaling": {"kind": "ntk", "factor": 2.0}}, r"rope_scaling.kind: got 'ntk'"),
        ({"rope_scaling": {"kind": "linear", "factor": 0.5}}, r"rope_scaling.factor: got 0.5"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, r"original_context: required by"),
        (
            {"rope_scaling": {"kind": "linear", "factor": 2.0, "beta_fast": 3.0}},
            r"rope_scaling.beta_fast: not used by rope scaling 'linear'",
        ),
        (
            {"rope_scaling": {"kind": "longrope", "factor": 2.0, "original_context": 8}},
            r"rope_scaling.long_factor: required by rope scaling 'longrope'",
        ),
        (
            {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "long_factor": [1.0]}},
            r"rope_scaling.long_factor: not used by rope scaling 'dynamic', which takes: factor",
        ),
        (
            {"rope_scaling": longrope(5)},
            r"rope_scaling.short_factor: got 5 numbers, must be head_dim / 2 = \d",
        ),
        (
            {"rope_scaling": longrope(2, short_factor=[1.0, 0.0])},
            r"rope_scaling.short_factor.1: got 0.0",
        ),
        ({"rope_scaling": longrope(2, original_context=1)}, r"original_context: got 1, must be"),
    ],
)
def test_a_bad_field_is_named_with_what_is_allowed(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TransformerConfig(**{**SHAPE, **change})


def test_llama3_needs_its_band_in_order() -> None:
    with pytest.raises(ConfigError, match=r"high_freq_factor: got 1\.0, must be above 4\.0"):
        RopeScaling(
            kind="llama3",
            factor=8.0,
            original_context=16,
            low_freq_factor=4.0,
            high_freq_factor=1.0,
        )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied": False, "kv_heads": 2},
        {"attention_bias": "qkv", "mlp_bias": True},
        {"attention_bias": "qkvo", "qk_norm": True, "head_dim": 16},
    ],
)
def test_parameters_are_counted_without_building(change: dict[str, object]) -> None:
    config = TransformerConfig(**{**SHAPE, **change})
    with torch.device("meta"):
        model = Transformer(config)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())


def test_presets_have_the_size_of_their_name() -> None:
    millions = {name: round(count_parameters(preset(name)) / 1e6) for name in PRESETS}
    assert millions == {"tiny": 1, "small": 10, "26m": 26, "135m": 135}
    assert preset("26m", vocab=999).vocab == 999
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        preset("tinny")
