"""The shape of a decoder-only transformer of the Llama family."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lezero.core.config import Config
from lezero.core.errors import ConfigError, Problem

# What each kind of RoPE scaling needs and may take, beyond `kind` and `factor`.
_SCALING_NEEDS = {
    "linear": set(),
    "dynamic": set(),
    "llama3": {"original_context", "low_freq_factor", "high_freq_factor"},
    "yarn": {"original_context"},
    "longrope": {"original_context", "short_factor", "long_factor"},
}
SCALING_TAKES = {
    "linear": set(),
    "dynamic": set(),
    "llama3": _SCALING_NEEDS["llama3"],
    "yarn": {
        *("original_context", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
    "longrope": {*_SCALING_NEEDS["longrope"], "attention_factor"},
}
_Divisors = tuple[Annotated[float, Field(gt=0.0)], ...]


def _refuse(field: str, value: object, reason: str) -> ConfigError:
    problem = Problem((field,), value, reason)
    return ConfigError(str(problem), (problem,))


class RopeScaling(Config):
    """How rotary frequencies are stretched beyond the context they were trained on.

    The kinds are those of transformers' `rope_parameters`: "linear" (position interpolation),
    "dynamic" (NTK-aware, grows with the sequence), "llama3" (Llama 3.1), "yarn" (Peng et al., 2023,
    "YaRN: Efficient Context Window Extension of Large Language Models") and "longrope" (Ding et
    al., 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens"; another set of
    divisors for sequences beyond the original context).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """Which formula."""
    factor: float = Field(ge=1.0)
    """How many times longer the context becomes."""
    original_context: int | None = Field(default=None, ge=1)
    """llama3, yarn, longrope: the context of the training before scaling, in tokens."""
    low_freq_factor: float | None = Field(default=None, gt=0.0)
    """llama3: wavelengths above original_context / this are stretched fully."""
    high_freq_factor: float | None = Field(default=None, gt=0.0)
    """llama3: wavelengths below original_context / this are kept."""
    attention_factor: float | None = Field(default=None, gt=0.0)
    """yarn, longrope: multiplies cos and sin; derived from the factor where not given."""
    beta_fast: float | None = Field(default=None, gt=0.0)
    """yarn: rotations above which a dimension is kept (32 where not given)."""
    beta_slow: float | None = Field(default=None, gt=0.0)
    """yarn: rotations below which a dimension is stretched fully (1 where not given)."""
    mscale: float | None = Field(default=None, gt=0.0)
    """yarn: with mscale_all_dim, another way to derive the attention factor."""
    mscale_all_dim: float | None = Field(default=None, gt=0.0)
    """yarn: see mscale."""
    truncate: bool | None = None
    """yarn: round the corrected range to whole dimensions (true where not given)."""
    short_factor: _Divisors | None = None
    """longrope: divides each pair's frequency in sequences up to original_context."""
    long_factor: _Divisors | None = None
    """longrope: the same in longer sequences."""

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        optional = set().union(*SCALING_TAKES.values())
        given = {name for name in optional if getattr(self, name) is not None}
        for name in sorted(_SCALING_NEEDS[self.kind] - given):
            raise _refuse(name, None, f"required by rope scaling '{self.kind}', but not given")
        for name in sorted(given - SCALING_TAKES[self.kind]):
            allowed = ", ".join(sorted({"factor", *SCALING_TAKES[self.kind]}))
            reason = f"not used by rope scaling '{self.kind}', which takes: {allowed}"
            raise _refuse(name, getattr(self, name), reason)
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise _refuse("high_freq_factor", high, f"got {high}, must be above {low}")
        if self.kind == "longrope" and self.original_context == 1:
            raise _refuse("original_context", 1, "got 1, must be above 1 for 'longrope'")
        return self


class TransformerConfig(Config):
    """A decoder-only transformer: RMSNorm, RoPE, SwiGLU, grouped-query attention.

    `kv_heads`, `head_dim` and `ffn` may be left out (or 0) and are then derived; after
    construction they hold the derived values.
    """

    vocab: int = Field(ge=1, le=1 << 24)
    """Tokens in the vocabulary."""
    dim: int = Field(ge=2, le=1 << 20)
    """Width of the residual stream."""
    layers: int = Field(ge=1, le=4096)
    """Transformer blocks."""
    heads: int = Field(ge=1, le=1 << 14)
    """Query heads."""
    kv_heads: int = Field(default=0, ge=0, le=1 << 14)
    """Key and value heads; each serves heads / kv_heads query heads. 0: as many as heads."""
    head_dim: int = Field(default=0, ge=0, le=1 << 14)
    """Width of one head. 0: dim / heads."""
    ffn: int = Field(default=0, ge=0, le=1 << 22)
    """Width inside SwiGLU. 0: 8/3 of dim, to the nearest multiple of 64."""
    context: int = Field(default=1024, ge=1, le=1 << 28)
    """Longest sequence, in tokens."""
    rope_theta: float = Field(default=10_000.0, gt=1.0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How the rotary frequencies are stretched; none: as trained."""
    norm_eps: float = Field(default=1e-5, gt=0.0, le=1.0)
    """Added to the mean square in RMSNorm."""
    tied: bool = True
    """The output head is the embedding matrix."""
    attention_bias: Literal["none", "qkv", "qkvo"] = "none"
    """Which projections of attention have a bias: none, query/key/value, or the output too."""
    mlp_bias: bool = False
    """The projections of SwiGLU have a bias."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before RoPE (Qwen3)."""
    sliding_window: int | None = Field(default=None, ge=1)
    """A token sees at most this many tokens, itself included (Mistral); none: all before it."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        dim, heads = data.get("dim"), data.get("heads")
        derived = dict(data)
        if isinstance(heads, int) and not data.get("kv_heads"):
            derived["kv_heads"] = heads
        if isinstance(dim, int) and not data.get("ffn"):
            derived["ffn"] = max(64, round(8 * dim / 3 / 64) * 64)
        if isinstance(dim, int) and isinstance(heads, int) and not data.get("head_dim"):
            derived["head_dim"] = dim // heads if heads > 0 and dim % heads == 0 else 0
        return derived

    @model_validator(mode="after")
    def _check(self) -> TransformerConfig:
        if self.head_dim == 0:
            reason = f"got {self.heads}, which does not divide dim {self.dim}; or give head_dim"
            raise _refuse("heads", self.heads, reason)
        if self.heads % self.kv_heads:
            reason = f"got {self.kv_heads}, which does not divide heads {self.heads}"
            raise _refuse("kv_heads", self.kv_heads, reason)
        if self.head_dim % 2:
            reason = f"got {self.head_dim}, must be even: RoPE rotates pairs"
            raise _refuse("head_dim", self.head_dim, reason)
        if self.rope_scaling is not None:
            self._check_scaling(self.rope_scaling)
        return self

    def _check_scaling(self, scaling: RopeScaling) -> None:
        if scaling.kind == "dynamic" and self.head_dim == 2:
            raise _refuse("rope_scaling", "dynamic", "dynamic scaling needs a head_dim above 2")
        for name in ("short_factor", "long_factor"):
            given, pairs = getattr(scaling, name), self.head_dim // 2
            if given is not None and len(given) != pairs:
                reason = f"got {len(given)} numbers, must be head_dim / 2 = {pairs}"
                raise _refuse(f"rope_scaling.{name}", given, reason)

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have: dynamic RoPE scaling reaches beyond `context`."""
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "dynamic":
            return int(self.context * scaling.factor)
        return self.context

    @property
    def steady(self) -> int:
        """Tokens up to which the length of a sequence does not change the angles of its positions.
        Where that is less than `longest`, a sequence that grows beyond has all keys turned anew."""
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "dynamic":
            return self.context
        if scaling is not None and scaling.kind == "longrope":
            return min(scaling.original_context or self.context, self.context)
        return self.longest

    def angles(self, length: int) -> int:
        """A number that lengths share whose sequences have equal angles at equal positions: the
        shortest of these lengths, and `steady` for all up to it."""
        if length <= self.steady:
            return self.steady
        scaling = self.rope_scaling
        grows = scaling is not None and scaling.kind == "dynamic"
        return length if grows else self.steady + 1


def count_parameters(config: TransformerConfig) -> int:
    """Trainable numbers of `Transformer(config)`; a tied head counts once."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    block = c.dim * (2 * q + 2 * kv + 3 * c.ffn) + 2 * c.dim
    if c.attention_bias != "none":
        block += q + 2 * kv + (c.dim if c.attention_bias == "qkvo" else 0)
    if c.mlp_bias:
        block += 2 * c.ffn + c.dim
    if c.qk_norm:
        block += 2 * c.head_dim
    return c.layers * block + c.dim + c.vocab * c.dim * (1 if c.tied else 2)
