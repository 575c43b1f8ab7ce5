"""Any transformer of `lezero.models`, in any dtype and form, with plain operations of torch.

Slower than `FusedProgram`, and what it is compared with: its weights and cache are in the model's
own dtype, so an fp32 model answers in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lezero.compress.quantize.modules import quantized_layers
from lezero.models import Transformer
from lezero.models.rope import rotate
from lezero.serve.program import Fed, Program, ending, wanted_rows

_BLOCK = 16
_MOST_TOKENS = 256
_FORMS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class PlainProgram(Program):
    """Runs the model's own modules; only attention looks into the cache of blocks."""

    block_size = _BLOCK
    most_tokens = _MOST_TOKENS

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self._model: Any = model.eval()
        self._dtype = model.norm.weight.dtype
        self.place = model.norm.weight.device
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
        self._keys = torch.empty(shape, dtype=self._dtype, device=self.place)
        self._values = torch.empty_like(self._keys)

    @torch.no_grad()
    def run(self, fed: Sequence[Fed]) -> Tensor:
        model, x = self._model, self._states(fed)
        head = model.embed_tokens.weight if model.lm_head is None else None
        logits: Tensor = F.linear(x, head) if head is not None else model.lm_head(x)
        return logits.float()

    @torch.no_grad()
    def states(self, fed: Sequence[Fed]) -> Tensor:
        return self._states(fed).float()

    def _states(self, fed: Sequence[Fed]) -> Tensor:
        model = self._model
        tokens = torch.tensor([t for one in fed for t in one.tokens], device=self.place)
        positions = torch.cat(
            [torch.arange(one.position, one.position + len(one.tokens)) for one in fed]
        ).to(self.place)
        model.rope.ready(int(positions.max()) + 1, self.place)
        cos, sin = model.rope.gather(positions[None])
        places = [self._places(one) for one in fed]
        x = model.embed_tokens(tokens[None])
        for index, block in enumerate(model.layers):
            y = self._attend(
                block.self_attn, block.input_layernorm(x), cos, sin, index, fed, places
            )
            x = x + y
            x = x + block.mlp(block.post_attention_layernorm(x))
        normed: Tensor = model.norm(x[0, wanted_rows(fed).to(self.place)])
        return normed

    def _places(self, one: Fed) -> Tensor:
        """Where each token of the sequence lies in the cache: (S,)."""
        seen = torch.arange(one.position + len(one.tokens))
        blocks = torch.tensor(one.blocks)
        return (blocks[seen // _BLOCK] * _BLOCK + seen % _BLOCK).to(self.place)

    def _attend(
        self,
        attention: Any,
        x_1TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        index: int,
        fed: Sequence[Fed],
        places: list[Tensor],
    ) -> Tensor:
        assert self._keys is not None
        assert self._values is not None
        q, k, v = (x[0] for x in projected(attention, x_1TD, cos, sin))
        found, first = [], 0
        for one, place in zip(fed, places, strict=True):
            rows = slice(first, first + len(one.tokens))
            first = rows.stop
            self._keys[index, place[one.position :]] = k[rows]
            self._values[index, place[one.position :]] = v[rows]
            found.append(self._one(q[rows], index, place, one.position))
        return attention.o_proj(torch.cat(found)[None].flatten(2))

    def _one(self, q_THE: Tensor, index: int, place_S: Tensor, position: int) -> Tensor:
        assert self._keys is not None
        assert self._values is not None
        seen = torch.arange(len(place_S), device=self.place)
        at = seen[position:, None]
        mask_TS = seen <= at
        if self.config.sliding_window is not None:
            mask_TS &= at - seen < self.config.sliding_window
        q, k, v = (
            x.transpose(0, 1)[None]
            for x in (q_THE, self._keys[index, place_S], self._values[index, place_S])
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TS, enable_gqa=True)
        return y[0].transpose(0, 1)

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
