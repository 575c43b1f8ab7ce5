"""Between `TransformerConfig` and the `config.json` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lezero.core.errors import ConfigError, FileError
from lezero.core.log import logger
from lezero.models.config import SCALING_TAKES, RopeScaling, TransformerConfig
from lezero.models.rope import attention_factor

_LOG = logger("models")
_READ = ("gptq", "awq", "lezero")
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Name here → name there, for the fields that mean the same in every supported type.
_FIELDS = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_SCALING = {
    "factor": "factor",
    "original_context": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}
# What transformers 5 assumes where config.json says nothing; `None` means required.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"context": 2048, "norm_eps": 1e-6},
    "mistral": {"context": 131072, "norm_eps": 1e-6, "kv_heads": 8, "sliding_window": 4096},
    "qwen2": {"context": 32768, "norm_eps": 1e-6, "kv_heads": 32, "sliding_window": 4096},
    "qwen3": {
        **{"context": 32768, "norm_eps": 1e-6, "kv_heads": 32, "sliding_window": 4096},
        "head_dim": 128,
    },
}


UNFINISHED = "unfinished"
"""What `config.json` says while the files of a folder are replaced."""


def from_hf(data: dict[str, Any], source: str = "config.json") -> TransformerConfig:
    """The config of a Hugging Face model; what this family cannot express is a `FileError`."""
    kind = data.get("model_type")
    if data.get(UNFINISHED):
        raise FileError(f"{source}: a save of this folder was cut off; save the model again")
    if kind not in SUPPORTED:
        raise FileError(
            f"{source}: model_type {kind!r} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    _refuse_unknown_forms(data, source)
    defaults = _DEFAULTS[kind]
    fields: dict[str, Any] = {}
    for ours, theirs in _FIELDS.items():
        if data.get(theirs) is not None:
            fields[ours] = data[theirs]
        elif ours in defaults and theirs not in data:
            fields[ours] = defaults[ours]
    shape = TransformerConfig.parse(fields, source)  # numbers in their bounds, for what follows
    fields |= _rope(data, fields.get("context"), source)
    fields["tied"] = bool(data.get("tie_word_embeddings", False))
    if kind == "llama":
        fields["mlp_bias"] = bool(data.get("mlp_bias", False))
    if kind in ("llama", "qwen3"):
        fields["attention_bias"] = "qkvo" if data.get("attention_bias") else "none"
    if kind == "qwen2":
        fields["attention_bias"] = "qkv"
    fields["qk_norm"] = kind == "qwen3"
    fields["sliding_window"] = _window(kind, data, shape.layers, source)
    config = TransformerConfig.parse(fields, source)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "yarn" and scaling.original_context is not None:
        # Who adds YaRN to a file, as Qwen's cards say, leaves max_position_embeddings as it is.
        reach = min(scaling.original_context * scaling.factor, 1 << 62)  # of any size until checked
        fields["context"] = max(config.context, int(reach))
        config = TransformerConfig.parse(fields, source)
    return config


def unread(quantization_config: Any) -> str:
    """Why nothing here opens weights that were quantized so, and what to do; "" of other ones."""
    said = quantization_config if isinstance(quantization_config, dict) else {}
    if said.get("quantized_by") == "lz.quantize_":
        return (
            "was written by save_pretrained from a model that lz.quantize_ had quantized, which "
            "leaves its weights out; write it again with lz.save_quantized"
        )
    if said.get("quant_method") == "compressed-tensors":
        return (
            "is in the compressed-tensors layout, which is written here for other servers and "
            "not read; take the folder of lz.save_quantized without layout=, or the float model"
        )
    if (method := said.get("quant_method")) not in _READ:
        return (
            f"the weights are quantized, and quant_method {str(method)[:40]!r} is not read; read "
            "are 'gptq' and 'awq': take one of these, or the float model and lz.quantize_"
        )
    return ""


def quantized_how(data: Mapping[str, Any]) -> Any:
    """What a config.json says of how weights were quantized; None of floats."""
    found = data.get("quantization_config")
    if found is None and data.get("compression_config") is not None:
        return {"quant_method": "compressed-tensors"}  # as it was called first
    return found


def _refuse_unknown_forms(data: dict[str, Any], source: str) -> None:
    if (how := quantized_how(data)) is not None:
        opens = "the weights are quantized; lz.load_quantized opens them"
        raise FileError(f"{source}: {unread(how) or opens}")
    act = data.get("hidden_act", "silu")
    if act not in ("silu", "swish"):  # two names of one function
        raise FileError(f"{source}: hidden_act {act!r} is not supported; supported is 'silu'")
    if data.get("num_local_experts") or data.get("num_experts"):
        raise FileError(f"{source}: mixtures of experts are not supported")
    if not data.get("is_causal", True):  # as embedders have it
        raise FileError(f"{source}: attention to later tokens (is_causal false) is not supported")


def _rope(data: dict[str, Any], context: Any, source: str) -> dict[str, Any]:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    found = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise FileError(f"{source}: rope_parameters: got {found!r:.80}, must be an object")
    if any(isinstance(value, dict) for value in found.values()):
        raise FileError(f"{source}: rope_parameters by layer type are not supported")
    rope = dict(found)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    theta = rope.pop("rope_theta", None) or data.get("rope_theta") or 10_000.0
    partial = rope.pop("partial_rotary_factor", None) or data.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise FileError(f"{source}: partial_rotary_factor {partial} is not supported; 1.0 is")
    if kind == "default":
        return {"rope_theta": theta}
    if not isinstance(kind, str) or kind not in SCALING_TAKES:
        raise FileError(
            f"{source}: rope_type {kind!r:.80} is not supported; supported are default, "
            f"{', '.join(SCALING_TAKES)}"
        )
    for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        rope[key] = rope.get(key) or None  # transformers takes 0 as not given
    taken = {"factor", *SCALING_TAKES[kind]}  # files in the wild carry keys that it ignores
    scaling = {k: rope[v] for k, v in _SCALING.items() if k in taken and rope.get(v) is not None}
    if "original_context" in taken:  # transformers prefers the config's own, and falls back to it
        outer = data.get("original_max_position_embeddings")
        scaling["original_context"] = outer or scaling.get("original_context") or context
        _derive_factor(kind, scaling, context)
    return {"rope_theta": theta, "rope_scaling": {"kind": kind, **scaling}}


def _derive_factor(kind: str, scaling: dict[str, Any], context: Any) -> None:
    """The factor of a file that leaves it out, or has one that means no stretching."""
    original = scaling["original_context"]
    if kind == "llama3" or not all(isinstance(x, int) and x > 0 for x in (original, context)):
        return
    scaling.setdefault("factor", context / original)
    if kind == "longrope" and isinstance(scaling["factor"], int | float):
        scaling["factor"] = max(1.0, scaling["factor"])


def _window(kind: str, data: dict[str, Any], layers: int, source: str) -> Any:
    if kind == "llama":
        return None
    window = data.get("sliding_window", _DEFAULTS[kind]["sliding_window"])
    if window is None or (kind != "mistral" and not data.get("use_sliding_window", False)):
        return None
    types = data.get("layer_types")  # of Mistral's, for transformers they make it a Ministral
    if types is None and kind == "mistral":
        return window
    if types is None:
        full = data.get("max_window_layers", 28)
        if type(full) is not int or full < 0:
            raise FileError(f"{source}: max_window_layers: got {full!r:.80}, must be a count")
        full = min(full, layers)
        types = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if not isinstance(types, list) or not all(isinstance(one, str) for one in types):
        raise FileError(f"{source}: layer_types: got {types!r:.80}, must be a list of names")
    if set(types) == {"full_attention"}:
        return None
    if set(types) == {"sliding_attention"}:
        return window
    raise FileError(f"{source}: layers of different attention (layer_types) are not supported")


def to_hf(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` that transformers (4 and 5) reads as this model.

    The type is the plainest that can express it: llama, mistral (a sliding window, or heads that do
    not divide `dim`, which transformers refuses in a llama), qwen2 (biases on query, key and value
    alone) or qwen3 (norms on queries and keys). A combination that none of them has is a
    `ConfigError`, but biases beside heads that do not divide `dim` are a llama, with a warning,
    which only transformers before 5 opens.
    """
    kind = _kind(config)
    data: dict[str, Any] = {"architectures": [_ARCHITECTURES[kind]], "model_type": kind}
    data |= {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    data |= {
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_theta": config.rope_theta,
    }
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = _scaling_to_hf(config.rope_scaling, config.context)
        data["rope_scaling"] = dict(rope)
        if config.rope_scaling.kind == "longrope":  # where transformers 4 looks for it
            data["original_max_position_embeddings"] = config.rope_scaling.original_context
    data["rope_parameters"] = {"rope_theta": config.rope_theta, **rope}
    if kind == "llama":
        data["mlp_bias"] = config.mlp_bias
    if kind in ("llama", "qwen3"):
        data["attention_bias"] = config.attention_bias == "qkvo"
    if kind == "mistral":
        data["sliding_window"] = config.sliding_window
    if kind in ("qwen2", "qwen3"):
        windowed = config.sliding_window is not None
        data["use_sliding_window"] = windowed
        data["sliding_window"] = config.sliding_window
        data["max_window_layers"] = 0 if windowed else config.layers
    return data


def _scaling_to_hf(scaling: RopeScaling, context: int) -> dict[str, Any]:
    values = {theirs: getattr(scaling, ours) for ours, theirs in _SCALING.items()}
    if scaling.kind == "longrope" and scaling.factor != context / (scaling.original_context or 1):
        # transformers 4 derives the factor from both contexts, whatever the file says.
        values["attention_factor"] = attention_factor(scaling)
    given = {key: value for key, value in values.items() if value is not None}
    lists = {key: list(value) for key, value in given.items() if isinstance(value, tuple)}
    return {"rope_type": scaling.kind, **given, **lists}


def _kind(config: TransformerConfig) -> str:
    has_biases = config.attention_bias != "none" or config.mlp_bias
    if config.qk_norm:
        kind, fits = "qwen3", config.attention_bias != "qkv" and not config.mlp_bias
    elif config.attention_bias == "qkv":
        kind, fits = "qwen2", not config.mlp_bias
    elif config.sliding_window is not None:
        kind, fits = "mistral", not has_biases
    elif config.dim % config.heads and not has_biases:
        kind, fits = "mistral", True
    else:
        kind, fits = "llama", True
        if config.dim % config.heads:
            _LOG.warning(
                "no Hugging Face model type has biases and %d heads of dim=%d; saved as a llama, "
                "which LeZero opens, and transformers before 5",
                *(config.heads, config.dim),
            )
    if not fits:
        raise ConfigError(
            "no Hugging Face model type has this combination: "
            f"attention_bias={config.attention_bias}, mlp_bias={config.mlp_bias}, "
            f"qk_norm={config.qk_norm}, sliding_window={config.sliding_window}"
        )
    return kind
