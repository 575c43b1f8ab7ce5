"""A decoder-only transformer of the Llama family, written to be read.

Shapes: B batch, T tokens, S tokens seen (those of a cache included), D width of the residual
stream, H query heads, K key-value heads, E width of a head, F width inside SwiGLU, V vocabulary.

Parameter names are those of the Hugging Face layout without the leading `model.`, so
`layers.0.self_attn.q_proj.weight` here is `model.layers.0.self_attn.q_proj.weight` there.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lezero.core.errors import ConfigError
from lezero.models.cache import KVCache, LayerCache
from lezero.models.config import TransformerConfig
from lezero.models.rope import Rope, rotate


class Attention(Protocol):
    """What computes attention: `Transformer(config, attention=...)` takes any such callable."""

    def __call__(
        self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """Returns `(B, H, T, E)`; scores are scaled by 1/sqrt(E).

        `mask` is boolean, broadcasts against `(B, 1, T, S)` and says which keys a query sees.
        Without a mask, `causal` says that query i sees the keys up to i (then T equals S), or
        that every query sees every key.
        """


def sdpa(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, mask: Tensor | None, causal: bool
) -> Tensor:
    """The default attention: torch's fused kernels, which share key heads by themselves."""
    grouped = q_BHTE.shape[1] != k_BKSE.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKSE, v_BKSE, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        self.head_dim, self.attention = config.head_dim, attention
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        bias = config.attention_bias != "none"
        self.q_proj = nn.Linear(config.dim, q_width, bias=bias)
        self.k_proj = nn.Linear(config.dim, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.dim, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, config.dim, bias=config.attention_bias == "qkvo")
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(
        self,
        x_BTD: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        causal: bool,
        cache: LayerCache | None,
    ) -> Tensor:
        heads = (-1, self.head_dim)
        q_BTHE = self.q_proj(x_BTD).unflatten(-1, heads)
        k_BTKE = self.k_proj(x_BTD).unflatten(-1, heads)
        v_BKTE = self.v_proj(x_BTD).unflatten(-1, heads).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        q_BHTE = rotate(q_BTHE, cos, sin).transpose(1, 2)
        k_BKTE = rotate(k_BTKE, cos, sin).transpose(1, 2)
        if cache is not None:
            k_BKTE, v_BKTE = cache.append(k_BKTE, v_BKTE)
        y_BHTE = self.attention(q_BHTE, k_BKTE, v_BKTE, mask=mask, causal=causal)
        return self.o_proj(y_BHTE.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Shazeer, 2020, "GLU Variants Improve Transformer", equation 6."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.dim, config.ffn, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.ffn, config.dim, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class TransformerBlock(nn.Module):
    """Attention, then SwiGLU, each on a normalised copy and added to the residual stream.

    The unit of compilation, recomputation and sharding: it compiles as one full graph.
    """

    def __init__(self, config: TransformerConfig, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = SelfAttention(config, attention)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        x_BTD: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        causal: bool = True,
        cache: LayerCache | None = None,
    ) -> Tensor:
        normed_BTD = self.input_layernorm(x_BTD)
        x_BTD = x_BTD + self.self_attn(normed_BTD, cos, sin, mask, causal, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Transformer(nn.Module):
    """Tokens in, logits out. Losses live in `lezero.train`.

    `attention` replaces the attention kernel (see `Attention`). Built under
    `torch.device("meta")` nothing is allocated; `to_empty(device=...)` and `init_weights(seed)`,
    or loading a state dict with `assign=True`, materialise it. Built elsewhere, the weights are
    drawn from `seed`.
    """

    def __init__(
        self, config: TransformerConfig, attention: Attention | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # torch's own initialisation would be drawn, then thrown away
            self.embed_tokens = nn.Embedding(config.vocab, config.dim)
            self.layers = nn.ModuleList(
                TransformerBlock(config, attention or sdpa) for _ in range(config.layers)
            )
            self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
            self.lm_head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
        self.rope = Rope(config)
        if torch.get_default_device().type != "meta":
            self._allocate()
            self.init_weights(seed)

    @property
    def actual_config(self) -> TransformerConfig:
        """`config`, with as many layers as there are blocks by now: some may be added or dropped.
        What is written beside the weights, and what caches are made by."""
        if len(self.layers) == self.config.layers:
            return self.config
        shape = {**self.config.to_dict(), "layers": len(self.layers)}
        return TransformerConfig.parse(shape, "the model's blocks")

    def _allocate(self) -> None:
        """Memory on the default device, as `to_empty` gives; this works on fake tensors too."""
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                module.register_parameter(name, nn.Parameter(empty))

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Gives every parameter its `first_weight`."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.first_weight(name, tuple(parameter.shape), seed))

    def first_weight(self, name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
        """fp32 values drawn from (seed, name): equal on any device, order and split.

        Normal with deviation 0.02, divided by sqrt(2 × layers) where a projection adds to the
        residual stream (Radford et al., 2019, "GPT-2", section 2.3); norms 1, biases 0.
        """
        if name.endswith("bias") or "norm" in name:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device="cpu")
        residual = 1 / math.sqrt(2 * self.config.layers)
        scale = residual if "o_proj" in name or "down_proj" in name else 1.0
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest) >> 1)
        drawn = torch.empty(shape, dtype=torch.float32, device="cpu")
        return drawn.normal_(0.0, 0.02 * scale, generator=generator)

    def forward(
        self,
        tokens_BT: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits `(B, T, V)` for the token after each one; last: `(B, 1, V)`, after the last one.

        `cache` holds the tokens before these and takes these in. `positions`, `(T,)` or `(B, T)`
        and rising along T, places tokens elsewhere than in a row from 0; negative ones are
        padding, which no token sees. RoPE scaling that depends on the length takes the largest
        position of all, and leaves the keys in a cache as they are. A sequence longer than the
        context is a `ConfigError`.
        """
        if tokens_BT.dim() != 2 or tokens_BT.shape[1] == 0:
            shape = tuple(tokens_BT.shape)
            raise ConfigError(f"tokens of shape {shape}: expected (batch, tokens), not empty")
        T = tokens_BT.shape[1]
        start = 0 if cache is None else cache.length
        end = start + T
        if cache is not None and end > cache.capacity:
            raise ConfigError(
                f"{end} tokens do not fit the cache of {cache.capacity}; make a larger one"
            )
        if positions is None and (cache is None or cache.positions_BS is None):
            self._reach(end, tokens_BT)
            cos, sin = self.rope.slice(start, end)
            mask = self._mask_in_a_row(start, end, tokens_BT.device)
        else:
            if positions is None:
                raise ConfigError("this cache was filled with positions: give them here too")
            positions_BT = positions.expand(tokens_BT.shape)
            self._reach(max(int(positions_BT.max()) + 1, 1), tokens_BT)
            cos, sin = self.rope.gather(positions_BT)
            seen_BS = positions_BT if cache is None else cache.extend_positions(positions_BT)
            mask = visible(positions_BT, seen_BS, self.config.sliding_window)
        # Not the condition itself, which is no bool while T is traced as a symbol.
        causal = True if mask is None and T > 1 else False  # noqa: SIM210
        x_BTD = self.embed_tokens(tokens_BT)
        for index, block in enumerate(self.layers):
            layer = None if cache is None else cache.layers[index]
            x_BTD = block(x_BTD, cos, sin, mask, causal, layer)
        x_BTD = self.norm(x_BTD[:, -1:] if last else x_BTD)
        if self.lm_head is not None:
            return self.lm_head(x_BTD)
        return F.linear(x_BTD, self.embed_tokens.weight)

    def _reach(self, length: int, tokens_BT: Tensor) -> None:
        if length > self.config.longest:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than the model's context of "
                f"{self.config.longest}; shorten it, or raise context (with rope_scaling)"
            )
        self.rope.ready(length, tokens_BT.device)

    def _mask_in_a_row(self, start: int, end: int, device: torch.device) -> Tensor | None:
        """None where plain causal attention is right (or one new token sees all)."""
        window = self.config.sliding_window
        windowed = window is not None and end > window
        if not windowed and (start == 0 or end - start == 1):
            return None
        seen_S = torch.arange(end, device=device)
        return visible(seen_S[None, start:], seen_S[None], window)


def visible(query_BT: Tensor, key_BS: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees, `(B, 1, T, S)`, from the positions of both.

    A token sees those up to its own position, `window` of them at most, and never padding
    (negative positions). Padding sees padding, so that no row of the softmax is empty.
    """
    query, key = query_BT[:, :, None], key_BS[:, None, :]
    mask_BTS = (key <= query) & ((key >= 0) | (query < 0))
    if window is not None:
        mask_BTS &= query - key < window
    return mask_BTS[:, None]
