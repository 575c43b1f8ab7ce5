"""Any transformer of `lezero.models`, in any dtype and form, with plain operations of torch.

Slower than `FusedProgram`, and what it is compared with: its weights and cache are in the model's
own dtype, so an fp32 model answers in fp32.

[Note: prompts on an accelerator] What a step needs beside its numbers is made on the host, sent
once, and used by all layers, and nothing waits for what the accelerator computes. Masks are left
out where attention knows the shape by itself, since fast kernels take none.

Shapes: T tokens of a step, S tokens of a sequence so far, H heads, E numbers of a head, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lezero.compress.quantize.modules import quantized_layers
from lezero.core import device
from lezero.models import Transformer
from lezero.models.rope import rotate
from lezero.serve.program import Fed, Program, ending, wanted_rows

_BLOCK = 16
_MOST_TOKENS = 256
_MOST_ON_ACCELERATORS = 8192
_FORMS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class PlainProgram(Program):
    """Runs the model's own modules; only attention looks into the cache of blocks."""

    block_size = _BLOCK

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self._model: Any = model.eval()
        self._dtype = model.norm.weight.dtype
        self.place = model.norm.weight.device
        self.most_tokens = most_tokens(self.place)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        name = str(self._dtype).removeprefix("torch.")
        self.kv = _FORMS.get(self._dtype, name)
        self.kv_forms = (self.kv,)
        held = f"quantized weights, {name}" if quantized_layers(self._model) else f"{name} weights,"
        self.description = f"plain torch, {held} keys and values{ending(self.config)}"

    def reserve(self, blocks: int) -> None:
        c = self.config
        shape = (c.layers, blocks * _BLOCK, c.kv_heads, c.head_dim)
        with device.using(self.place):
            self._keys = torch.empty(shape, dtype=self._dtype, device=self.place)
            self._values = torch.empty_like(self._keys)

    @torch.no_grad()
    def run(self, fed: Sequence[Fed]) -> Tensor:
        with device.using(self.place):
            model, x = self._model, self._states(fed)
            head = model.embed_tokens.weight if model.lm_head is None else None
            logits: Tensor = F.linear(x, head) if head is not None else model.lm_head(x)
            return logits.float()

    @torch.no_grad()
    def states(self, fed: Sequence[Fed]) -> Tensor:
        with device.using(self.place):
            return self._states(fed).float()

    def _states(self, fed: Sequence[Fed]) -> Tensor:
        model, rows_R = self._model, device.sent(wanted_rows(fed), self.place)
        passages, (token_T, position_T, place_T) = self._passages(fed)
        model.rope.ready(max(one.position + len(one.tokens) for one in fed), self.place)
        cos, sin = model.rope.gather(position_T[None])
        x = model.embed_tokens(token_T[None])
        for index, block in enumerate(model.layers):
            normed = block.input_layernorm(x)
            x = x + self._attend(block.self_attn, normed, cos, sin, index, place_T, passages)
            x = x + block.mlp(block.post_attention_layernorm(x))
        normed = model.norm(x[0, rows_R])
        return normed

    def _passages(self, fed: Sequence[Fed]) -> tuple[list[_Passage], Tensor]:
        """What attention has to know of each sequence; tokens, positions and places in the cache
        of all that is fed, int64 (3, T)."""
        fed_3T, seen, reach = [], [], []
        for one in fed:
            end = one.position + len(one.tokens)
            at_S = torch.arange(end, device="cpu")
            blocks, tokens_T = (
                torch.tensor(list(x), device="cpu") for x in (one.blocks, one.tokens)
            )
            place_S = blocks[at_S // _BLOCK] * _BLOCK + at_S % _BLOCK
            new = slice(one.position, end)
            fed_3T.append(torch.stack([tokens_T, at_S[new], place_S[new]]))
            reach.append(end if one.position else 0)
            seen.append(place_S[: reach[-1]])
        whole = device.sent(torch.cat([torch.cat(fed_3T, 1).flatten(), *seen]), self.place)
        T = sum(len(one.tokens) for one in fed)
        passages, first = [], 0
        for one, seen_S in zip(fed, whole[3 * T :].split(reach), strict=True):
            rows = slice(first, first + len(one.tokens))
            passages.append(_Passage.of(one, rows, seen_S, self.config.sliding_window))
            first = rows.stop
        return passages, whole[: 3 * T].view(3, T)

    def _attend(
        self,
        attention: Any,
        x_1TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        index: int,
        place_T: Tensor,
        passages: Sequence[_Passage],
    ) -> Tensor:
        assert self._keys is not None
        assert self._values is not None
        q_THE, k_THE, v_THE = (x[0] for x in projected(attention, x_1TD, cos, sin))
        keys, values = self._keys[index], self._values[index]
        keys.index_copy_(0, place_T, k_THE)
        values.index_copy_(0, place_T, v_THE)
        found = []
        for one in passages:
            if one.seen_S is None:
                found.append(one.look(q_THE[one.rows], k_THE[one.rows], v_THE[one.rows]))
            else:
                found.append(one.look(q_THE[one.rows], keys[one.seen_S], values[one.seen_S]))
        return attention.o_proj(torch.cat(found)[None].flatten(2))

    @property
    def block_bytes(self) -> int:
        c = self.config
        return 2 * self._dtype.itemsize * _BLOCK * c.layers * c.kv_heads * c.head_dim

    @property
    def weight_bytes(self) -> int:
        held = {id(x): x for x in [*self._model.parameters(), *self._model.buffers()]}
        return sum(x.nbytes for x in held.values())

    @property
    def read_bytes(self) -> int:
        embedding = 0 if self._model.lm_head is None else self._model.embed_tokens.weight.nbytes
        return self.weight_bytes - embedding


@dataclass(frozen=True, slots=True)
class _Passage:
    """A sequence of a step. rows: those of the step that are its own. seen_S: places of all of its
    tokens, where it does not begin with the step. Without a mask it looks at all that came before
    each token, or where `causal` is False at everything."""

    rows: slice
    seen_S: Tensor | None
    mask: Any = None
    causal: bool = False

    @classmethod
    def of(cls, fed: Fed, rows: slice, seen_S: Tensor, window: int | None) -> _Passage:
        """window: tokens that each looks back on, itself one of them."""
        T = len(fed.tokens)
        S = fed.position + T
        seen = seen_S if fed.position else None
        if window is not None and window < S:
            at = torch.arange(S, device=seen_S.device)
            new_T1 = at[fed.position :, None]
            return cls(rows, seen, (at <= new_T1) & (new_T1 - at < window))
        if T == 1 or not fed.position:
            return cls(rows, seen, causal=T > 1)
        return cls(rows, seen, causal_lower_right(T, S))

    def look(self, q_THE: Tensor, k_SHE: Tensor, v_SHE: Tensor) -> Tensor:
        """Attention over what it sees: (T, H, E)."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THE, k_SHE, v_SHE))
        grouped = self.mask is None
        if not grouped:  # fast kernels take a mask, or groups of heads, but not both
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        how = {"attn_mask": self.mask, "is_causal": self.causal, "enable_gqa": grouped}
        y: Tensor = F.scaled_dot_product_attention(q, k, v, **how)
        return y[0].transpose(0, 1)


def most_tokens(place: torch.device) -> int:
    """Tokens of a step: on accelerators as many as fill its products."""
    return _MOST_TOKENS if place.type == "cpu" else _MOST_ON_ACCELERATORS


def projected(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned to their positions, and values, of states (B, T, D):
    (B, T, heads, numbers of a head)."""
    heads = (-1, attention.head_dim)
    q = attention.q_proj(x).unflatten(-1, heads)
    k = attention.k_proj(x).unflatten(-1, heads)
    v = attention.v_proj(x).unflatten(-1, heads)
    if attention.q_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    return rotate(q, cos, sin), rotate(k, cos, sin), v
