import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lezero.core.errors import ConfigError, CorruptError, FileError
from lezero.models import Transformer, TransformerConfig, load_hf, save_hf
from lezero.models.hf_config import from_hf, to_hf
from lezero.models.rope import frequencies
from tests.models.test_rope import SCALINGS, longrope

transformers = pytest.importorskip("transformers")

SHAPE = {"vocab": 60, "dim": 32, "layers": 2, "heads": 4, "ffn": 48, "context": 64}
TOKENS = torch.randint(60, (2, 40), generator=torch.Generator().manual_seed(0))

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "grouped": {"kv_heads": 2, "tied": False, "rope_theta": 5e5, "norm_eps": 1e-6},
    "wide heads": {"head_dim": 16, "kv_heads": 1},
    "heads that do not divide": {"dim": 40, "heads": 6, "head_dim": 8, "kv_heads": 3},
    "biases": {"attention_bias": "qkvo", "mlp_bias": True},
    "mistral": {"kv_heads": 2, "sliding_window": 7},
    "qwen2": {"attention_bias": "qkv", "kv_heads": 2},
    "qwen2 window": {"attention_bias": "qkv", "sliding_window": 5},
    "qwen3": {"qk_norm": True, "kv_heads": 2, "head_dim": 16},
    **{f"{s['kind']} {i}": {"rope_scaling": s} for i, s in enumerate(SCALINGS)},
    "longrope": {"rope_scaling": longrope(4)},
    "longrope within": {"rope_scaling": longrope(4, original_context=40, factor=1.6)},
    "longrope factor": {"rope_scaling": longrope(4, attention_factor=1.5), "kv_heads": 2},
    "longrope mistral": {"rope_scaling": longrope(4), "sliding_window": 9},
    "longrope qwen3": {"rope_scaling": longrope(8), "qk_norm": True, "head_dim": 16},
}


def scatter(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights (norms and biases too) far from where they start, so that no mistake hides."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * drawn if "norm" in name else 0.15 * drawn)


def build(**change: Any) -> Transformer:
    model = Transformer(TransformerConfig(**{**SHAPE, **change}))
    scatter(model)
    return model


def difference(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def logits(model: torch.nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_model_opens_in_transformers_and_here(variant: str, tmp_path: Path) -> None:
    model = build(**VARIANTS[variant])
    save_hf(model, tmp_path / "out")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert difference(logits(model), logits(theirs)) < 1e-6
    again = load_hf(tmp_path / "out")
    assert again.config == model.config
    assert torch.equal(logits(again), logits(model))


def test_dynamic_scaling_agrees_beyond_the_context(tmp_path: Path) -> None:
    model = build(rope_scaling={"kind": "dynamic", "factor": 2.0}, context=16)
    save_hf(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = TOKENS[:, :30]
    assert difference(logits(model, tokens), logits(theirs, tokens)) < 1e-6


@pytest.mark.parametrize("tokens", [16, 17, 40])
def test_longrope_agrees_up_to_the_original_context_and_beyond(tokens: int, tmp_path: Path) -> None:
    model = build(rope_scaling=longrope(4))
    save_hf(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for length in (tokens, 40, tokens):  # what came before leaves nothing behind
        given = TOKENS[:, :length]
        assert difference(logits(model, given), logits(theirs, given)) < 1e-6


def test_longrope_is_written_for_transformers_4_too() -> None:
    """It derives the factor from both contexts, and looks for the original one outside."""
    config = TransformerConfig(**SHAPE, rope_scaling=longrope(4))
    data = to_hf(config, "float32")
    assert data["original_max_position_embeddings"] == 16
    assert "attention_factor" not in data["rope_scaling"]
    data = to_hf(TransformerConfig(**SHAPE, rope_scaling=longrope(4, factor=9.0)), "float32")
    assert data["rope_scaling"]["attention_factor"] == frequencies(from_hf(data))[1]
    assert "original_max_position_embeddings" not in to_hf(build().config, "float32")


SMALL = {
    **{"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": None},
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 2.5]},
    "long_factor": [1.0, 4.0, 6.0, 9.0],
}
THEIRS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama grouped": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "llama head_dim": {"num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-3},
    "llama llama3": {
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        }
    },
    "llama yarn": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
            "original_max_position_embeddings": 16,
        }
    },
    "llama yarn zeros": {
        "hidden_act": "swish",
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0},
            **{"mscale_all_dim": 0, "beta_fast": 0, "original_max_position_embeddings": 16},
        },
    },
    "llama longrope": {"rope_parameters": {**LONG, "original_max_position_embeddings": 24}},
    "llama longrope factor": {
        "rope_parameters": {**LONG, "original_max_position_embeddings": 24, "factor": 9.0}
    },
    "llama longrope small factor": {
        "rope_parameters": {**LONG, "original_max_position_embeddings": 24, "factor": 0.5}
    },
    "llama longrope attention": {
        "rope_parameters": {
            **{**LONG, "original_max_position_embeddings": 24, "factor": 2.0},
            "attention_factor": 1.4,
        }
    },
    "llama longrope outside": {"rope_parameters": LONG, "original_max_position_embeddings": 24},
    "llama longrope both": {
        "rope_parameters": {**LONG, "original_max_position_embeddings": 48},
        "original_max_position_embeddings": 24,
    },
    "llama longrope neither": {"rope_parameters": LONG},
    "llama llama3 both": {
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        },
        "original_max_position_embeddings": 60,
    },
    "mistral": {"num_key_value_heads": 2, "sliding_window": 6},
    "mistral whole": {"num_key_value_heads": 4, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2 window": {
        **{"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 6},
        "max_window_layers": 0,
    },
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def save_theirs(name: str, folder: Path, **arguments: Any) -> Any:
    config_class = getattr(transformers, f"{CLASSES[name.split()[0]]}Config")
    config = config_class(**{**SMALL, **copy.deepcopy(THEIRS[name])})  # it writes into its dicts
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    scatter(model, seed=2)
    model.save_pretrained(folder, **arguments)
    return model


@pytest.mark.parametrize("name", THEIRS)
def test_a_folder_of_transformers_loads_here(name: str, tmp_path: Path) -> None:
    theirs = save_theirs(name, tmp_path)
    model = load_hf(tmp_path)
    for tokens in (TOKENS, TOKENS[:, :20]):
        assert difference(logits(model, tokens), logits(theirs, tokens)) < 1e-6
    assert all(p.requires_grad for p in model.parameters())


def test_shards_are_read_and_written(tmp_path: Path) -> None:
    theirs = save_theirs("llama grouped", tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    model = load_hf(tmp_path / "theirs")
    assert difference(logits(model), logits(theirs)) < 1e-6
    save_hf(model, tmp_path / "ours", shard_bytes=20_000)
    shards = [load_file(file) for file in (tmp_path / "ours").glob("*.safetensors")]
    assert len(shards) > 2
    assert all(sum(t.nbytes for t in shard.values()) <= 20_000 for shard in shards)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert difference(logits(model), logits(again)) < 1e-6
    save_hf(model, tmp_path / "ours")  # a smaller layout replaces the larger one
    assert [p.name for p in (tmp_path / "ours").glob("model*")] == ["model.safetensors"]
    assert list(tmp_path.glob(".*")) == []


def test_dtypes_are_kept_or_cast(tmp_path: Path) -> None:
    model = build().bfloat16()
    save_hf(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_hf(tmp_path).embed_tokens.weight.dtype == torch.bfloat16
    wide = load_hf(tmp_path, dtype=torch.float32)
    assert wide.embed_tokens.weight.dtype == torch.float32
    assert torch.equal(wide.embed_tokens.weight, model.embed_tokens.weight.float())


def test_old_style_config_is_understood() -> None:
    old = {**SMALL, "model_type": "llama", "rope_theta": 5e5}
    old["rope_scaling"] = {"type": "linear", "factor": 2.0}
    config = from_hf(old)
    assert config.rope_theta == 5e5
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 2.0)
    assert config.context == 64
    assert not config.tied


def test_the_configs_own_original_context_counts_first_as_in_transformers() -> None:
    inner = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    data = {**SMALL, "max_position_embeddings": 8192, "model_type": "llama", "rope_scaling": inner}
    data["original_max_position_embeddings"] = 2048
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig.from_dict(copy.deepcopy(data))
    )
    torch.testing.assert_close(frequencies(from_hf(data))[0], theirs.inv_freq, rtol=1e-6, atol=0)


def test_yarn_reaches_as_far_as_it_stretches() -> None:
    """Qwen's cards add the scaling and leave `max_position_embeddings`."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    data = {**SMALL, "model_type": "llama", "rope_scaling": scaling}
    config = from_hf({**data, "max_position_embeddings": 40960})
    assert config.context == config.longest == 131072
    assert from_hf(to_hf(config, "float32")) == config
    assert from_hf({**data, "max_position_embeddings": 200_000}).context == 200_000
    with pytest.raises(ConfigError, match="context: got"):
        from_hf({**data, "rope_scaling": {**scaling, "factor": 1e308}})


def test_the_first_28_layers_see_everything_where_nothing_is_said() -> None:
    data = {**SMALL, "use_sliding_window": True, "sliding_window": 8, "num_key_value_heads": 4}
    assert from_hf({**data, "model_type": "qwen2"}).sliding_window is None
    assert from_hf({**data, "model_type": "qwen2", "max_window_layers": 0}).sliding_window == 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are llama, mistral"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"is_causal": False}, "later tokens .is_causal false"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "su"}}, "'su' is not supported; .* yarn, longrope"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "long_factor: required by"),
        ({"rope_scaling": {**LONG, "long_factor": [1.0]}}, "long_factor: got 1 numbers, must be"),
        ({"rope_scaling": {**LONG, "long_factor": "ab"}}, "long_factor: got 'ab'"),
        (
            {"rope_scaling": {**LONG, "original_max_position_embeddings": "16"}},
            "rope_scaling.factor: required",
        ),
        ({"rope_scaling": {**LONG, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"num_attention_heads": 5}, "heads: got 5, which does not divide"),
        ({"hidden_size": None}, "dim: required"),
        ({"num_hidden_layers": 10**12}, "layers: got 1000000000000"),
        ({"max_position_embeddings": 10**400, "rope_scaling": LONG}, "context: got 1000"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type \['yarn'\] is not supported"),
        ({"rope_scaling": "yarn"}, "rope_parameters: got 'yarn', must be an object"),
    ],
)
def test_a_config_outside_the_family_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    data = {**SMALL, "model_type": "llama", **change}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises((FileError, ConfigError), match=says):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_window_layers": 1}, "layers of different attention"),
        ({"max_window_layers": "1"}, "max_window_layers: got '1', must be a count"),
        ({"layer_types": 3}, "layer_types: got 3, must be a list of names"),
        ({"layer_types": [["x"]]}, "layer_types: got .*, must be a list of names"),
        ({"num_hidden_layers": 10**9}, "layers: got 1000000000"),
    ],
)
def test_layers_of_different_attention_are_refused(change: dict[str, Any], says: str) -> None:
    data = {**SMALL, "model_type": "qwen2", "use_sliding_window": True, "num_key_value_heads": 2}
    with pytest.raises((FileError, ConfigError), match=says):
        from_hf(data | change)


def test_a_combination_no_type_has_is_refused() -> None:
    config = TransformerConfig(**SHAPE, qk_norm=True, mlp_bias=True)
    with pytest.raises(ConfigError, match="no Hugging Face model type"):
        to_hf(config, "float32")


def test_pickled_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    save_hf(build(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileError, match="safe_serialization=True"):
        load_hf(tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_hf(build(), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    gone = {k: v for k, v in whole.items() if k != "model.layers.1.mlp.up_proj.weight"}
    save_file(gone, file)
    with pytest.raises(FileError, match=r"missing layers\.1\.mlp\.up_proj\.weight"):
        load_hf(tmp_path)
    save_file({**whole, "model.layers.9.extra": torch.zeros(2)}, file)
    with pytest.raises(FileError, match=r"unexpected layers\.9\.extra \(2,\)"):
        load_hf(tmp_path)
    save_file({**whole, "model.norm.weight": torch.zeros(3)}, file)
    with pytest.raises(FileError, match=r"norm.weight has shape \(3,\), config.json says \(32,\)"):
        load_hf(tmp_path)
    save_file({**whole, "lm_head.weight": torch.zeros(60, 32)}, file)
    with pytest.raises(FileError, match=r"lm_head\.weight differs from the embedding"):
        load_hf(tmp_path)
    save_file({**whole, "lm_head.weight": whole["model.embed_tokens.weight"].clone()}, file)
    load_hf(tmp_path)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there is no such folder"):
        load_hf(tmp_path / "nothing")
    save_hf(build(), tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    for damaged in (data[:-10], data[:5], b"", b"\xff" * 100):
        file.write_bytes(damaged)
        with pytest.raises(CorruptError, match=r"model\.safetensors"):
            load_hf(tmp_path)
    file.unlink()
    with pytest.raises(FileError, match="has neither"):
        load_hf(tmp_path)
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match="not a safetensors file beside it"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileError, match="not readable JSON"):
        load_hf(tmp_path)


@pytest.mark.parametrize("call", ["save_file", "os.fsync"])  # NFS and quotas refuse in fsync
def test_a_failed_save_leaves_what_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    save_hf(model, tmp_path / "out")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"lezero.models.hf_writing.{call}", full)
    with pytest.raises(FileError, match="No space left on device"):
        save_hf(build(tied=False), tmp_path / "out")
    assert torch.equal(logits(load_hf(tmp_path / "out")), logits(model))
    assert list(tmp_path.glob(".*")) == []


def test_a_model_without_weights_cannot_be_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**SHAPE))
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight is on the meta device"):
        save_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
