"""The Llama family on the CPU: all layers in one call of `lezero.ops.decoder`.

The residual stream is fp32, keys and values are bf16 or int8, weights are bf16, int8 or int4.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lezero.compress.quantize.weights import PackedWeight
from lezero.core.errors import OrderError
from lezero.memory import HugePages, huge_room
from lezero.models import Transformer
from lezero.models.transformer import TransformerBlock
from lezero.ops.decoder import (
    BLOCK,
    MOST_TOKENS,
    Beginning,
    BlockCache,
    Decoder,
    Ending,
    LayerWeights,
    Shape,
    Weight,
    block_bytes,
)
from lezero.ops.decoder.panels import settle_panels
from lezero.ops.linear import embedding_rows, in_rows
from lezero.serve.likeliest import best_tokens
from lezero.serve.merged import merged
from lezero.serve.program import Fed, Program, block_table, ending, split_prompts, wanted_rows

_Places = tuple[Tensor, Tensor, Tensor, Tensor, BlockCache]
_MOST_STEPS, _MOST_DRAWN, _MOST_S = 8, 32, 0.02
"""Of one `follow`: steps, tokens, and seconds, for which a new request may have to wait."""


class FusedProgram(Program):
    """Takes the weights out of `model` layer by layer, so that they are never there twice; to huge
    pages where the system gives them.

    x_blocks: inputs of layers of 4 and 8 bits that would be kept in 16 bits are rounded to 8, in
    blocks of at most 128 that have a scale each.
    fetch: is called before a part is taken, with the block's index, or with None for all beside the
    blocks; a part may lie on meta until then.
    """

    block_size = BLOCK
    invariant = True
    kv_forms = ("bf16", "int8")

    def __init__(
        self,
        model: Transformer,
        *,
        x_blocks: bool = False,
        fetch: Callable[[int | None], None] = lambda _: None,
    ) -> None:
        fetch(None)
        self.config = model.config
        self._shape = shape_of(model)
        self._rope = model.rope
        self._embedding: nn.Module = model.embed_tokens
        self._norm = model.norm.weight.detach().float()
        head: nn.Module = model.embed_tokens if model.lm_head is None else model.lm_head
        self._head = merged([head], x_blocks)
        if head is model.embed_tokens and self._head.bits == 16:
            self._embedding = _PackedRows(self._head)  # one copy serves both
            model.embed_tokens = Taken()  # type: ignore[assignment]
        elif _is_wide(table := getattr(self._embedding, "weight", None)):
            self._embedding = nn.Embedding.from_pretrained(table.detach().bfloat16())
            model.embed_tokens = Taken()  # type: ignore[assignment]
        model.lm_head = None
        del head
        pages, weights = HugePages(), []
        for index, block in enumerate(model.layers):
            fetch(index)
            weights.append(_layer(block, x_blocks))
            model.layers[index] = Taken()
            pages.move(x for w in _matrices(weights[-1]) for x in _tensors(w))
        pages.move(_tensors(self._head))
        self._decoder = Decoder(
            self._shape, weights, Ending(self._norm, self._head), _beginning(self._embedding),
            room=huge_room,
        )  # fmt: skip
        self.prompts_apart, self.most_tokens = self._decoder.rounds, self._decoder.most_tokens
        settle_panels(self._decoder)
        self._step_s = _MOST_S
        """What the last step of one token a sequence took."""
        self._cache: BlockCache | None = None
        self.keep_kv("bf16")

    @property
    def most_beside(self) -> int:
        return MOST_TOKENS // 2

    def keep_kv(self, form: str) -> None:
        super().keep_kv(form)
        said = _said(self._decoder.layers)
        kept = f"{form} keys and values{ending(self.config)}"
        self.description = f"{said}, fp32 residual stream, {kept}"

    def reserve(self, blocks: int) -> None:
        self._cache = BlockCache.empty(self.config.layers, blocks, self._shape, self._kv_bits)

    @torch.no_grad()
    def run(self, fed: Sequence[Fed]) -> Tensor:
        return self._timed(fed, best=False)[0]

    @torch.no_grad()
    def best(self, fed: Sequence[Fed]) -> list[int]:
        logits_RV, best_R = self._timed(fed, best=True)
        found: list[int] = best_R.tolist()
        return best_tokens(logits_RV) if -1 in found else found

    def _timed(self, fed: Sequence[Fed], best: bool) -> tuple[Tensor, Tensor]:
        if self.prompts_apart and any(one.prompt for one in fed):
            prompts, rest, order = split_prompts(fed)
            found = self._logits(prompts, best, rounded=True)
            if not rest:
                return found
            both = zip(found, self._logits(rest, best), strict=True)
            logits_RV, best_R = (torch.cat(two) for two in both)
            return logits_RV[order], best_R[order] if best else best_R
        began = time.perf_counter()
        found = self._logits(fed, best)
        if all(len(one.tokens) == 1 for one in fed):
            self._step_s = time.perf_counter() - began
        return found

    def _logits(
        self, fed: Sequence[Fed], best: bool, rounded: bool = False
    ) -> tuple[Tensor, Tensor]:
        rows = wanted_rows(fed, torch.int32)
        return self._decoder.logits(*self._given(fed), rows, best, rounded)

    def steps_at_once(self, sequences: int, by_chance: bool = False) -> int:
        if not (self._decoder.draws if by_chance else self._decoder.follows):
            return 1
        return max(1, min(_MOST_STEPS, _MOST_DRAWN // sequences, int(_MOST_S / self._step_s)))

    @torch.no_grad()
    def follow(
        self, fed: Sequence[Fed], steps: int, asked: Tensor | None = None
    ) -> list[list[int]]:
        began, tokens = time.perf_counter(), [token for one in fed for token in one.tokens]
        found = self._decoder.follow(tokens, steps, *self._places(fed, steps), asked)
        self._step_s = (time.perf_counter() - began) / len(found)
        return found

    @torch.no_grad()
    def states(self, fed: Sequence[Fed]) -> Tensor:
        rounded = self.prompts_apart and all(one.prompt == len(one.tokens) for one in fed)
        self._decoder.run(*(given := self._given(fed)), rounded)
        x_RD = given[0][wanted_rows(fed)]
        return torch.nn.functional.rms_norm(
            x_RD, (self.config.dim,), self._norm, self.config.norm_eps
        )

    def _given(self, fed: Sequence[Fed]) -> tuple[Tensor, *_Places]:
        """What the decoder takes of a step; the residual stream first."""
        tokens = torch.tensor([token for one in fed for token in one.tokens], device="cpu")
        return (self._embedded(tokens), *self._places(fed, 1))

    def _places(self, fed: Sequence[Fed], steps: int) -> _Places:
        """Angles that reach as far as `steps` steps from here, chunks, blocks, and the cache."""
        assert self._cache is not None, "reserve the cache first"
        end = max(one.position + len(one.tokens) for one in fed) + steps - 1
        self._rope.ready(end, self.place)
        chunks, first = [], 0
        for one in fed:
            chunks.append([first, len(one.tokens), one.position])
            first += len(one.tokens)
        angles = (self._rope.cos_TP, self._rope.sin_TP)
        chunks_3 = torch.tensor(chunks, dtype=torch.int32, device="cpu")
        return (*angles, chunks_3, block_table(fed), self._cache)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """fp32 (T, D); the engine has seen that they are tokens of the model."""
        weight = getattr(self._embedding, "weight", None)
        if not isinstance(weight, PackedWeight):
            return self._embedding(tokens).float()
        form = (self.config.dim, weight.grid.bits, weight.group, weight.dtype)
        return embedding_rows(tokens, weight.parts(), *form).float()

    def matrices(self) -> list[tuple[Weight, ...]]:
        """The matrices of each layer, in the order in which a step reads them."""
        return [_matrices(layer) for layer in self._decoder.layers]

    @property
    def product_forms(self) -> tuple[str, ...]:
        eight = any(w.bits != 16 and w.x_bits == 8 for y in self.matrices() for w in y)
        return ("fp32", "bf16", "int8") if eight and not self.prompts_apart else ("fp32", "bf16")

    @property
    def block_bytes(self) -> int:
        c = self.config
        return 2 * c.layers * c.kv_heads * block_bytes(c.head_dim, self._kv_bits)

    @property
    def _kv_bits(self) -> int:
        return 8 if self.kv == "int8" else 16

    @property
    def weight_bytes(self) -> int:
        held = {id(x): x for x in self._tensors()}
        return sum(x.nbytes for x in held.values())

    @property
    def read_bytes(self) -> int:
        layers = sum(weight_bytes(w) for y in self._decoder.layers for w in _matrices(y))
        return layers + weight_bytes(self._head)

    def _tensors(self) -> list[Tensor]:
        found = [*self._embedding.parameters(), *self._embedding.buffers(), self._norm]
        weights = [self._head, *(w for y in self._decoder.layers for w in _matrices(y))]
        return found + [x for w in weights for x in _tensors(w)]


def _is_wide(weight: Tensor | nn.Module | None) -> TypeGuard[Tensor]:
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.itemsize > 2


def _beginning(embedding: nn.Module) -> Beginning | None:
    """The embedding as kernels read it; None where it is not packed."""
    weight = getattr(embedding, "weight", None)
    if type(weight) is not PackedWeight or in_rows(weight.parts()):
        return None
    V, D = weight.full_shape
    return Beginning(
        Weight(weight.parts(), None, V, D, weight.grid.bits, weight.group), weight.dtype
    )


def shape_of(model: Transformer) -> Shape:
    c = model.config
    return Shape(
        *(c.dim, c.heads, c.kv_heads, c.head_dim, c.ffn, c.norm_eps), window=c.sliding_window or 0
    )


def _tensors(weight: Weight) -> list[Tensor]:
    return [x for x in (*weight.packed, weight.bias) if x is not None]


def weight_bytes(weight: Weight) -> int:
    return sum(x.nbytes for x in weight.packed if x is not None)


def _layer(block: Any, x_blocks: bool) -> LayerWeights:
    assert isinstance(block, TransformerBlock)
    attention, mlp = block.self_attn, block.mlp
    return LayerWeights(
        norm1=_vector(block.input_layernorm),
        qkv=merged([attention.q_proj, attention.k_proj, attention.v_proj], x_blocks),
        out=merged([attention.o_proj], x_blocks),
        norm2=_vector(block.post_attention_layernorm),
        gate_up=merged([mlp.gate_proj, mlp.up_proj], x_blocks),
        down=merged([mlp.down_proj], x_blocks),
        q_norm=None if attention.q_norm is None else _vector(attention.q_norm),
        k_norm=None if attention.k_norm is None else _vector(attention.k_norm),
    )


def _matrices(layer: LayerWeights) -> tuple[Weight, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _vector(norm: Any) -> Tensor:
    found: Tensor = norm.weight.detach().float().contiguous()
    return found


class Taken(nn.Module):
    """In the place of a block whose weights a `FusedProgram` took."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise OrderError(
            "this model was given to an LLM, which took its weights; ask the LLM, or build the "
            "model again"
        )


class _PackedRows(nn.Module):
    """An embedding over a packed bf16 matrix, which the head reads too."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        panels = self._weight.packed.weight  # (P, K / 2, 16, 2)
        rows = panels[ids // 16, :, ids % 16]
        return rows.flatten(1)[:, : self._weight.in_features]


def _said(layers: Sequence[LayerWeights]) -> str:
    """Which weights there are, in a few words."""
    found = Counter(_form(weight) for layer in layers for weight in _matrices(layer))
    if len(found) == 1:
        ((name, more),) = found
        return f"{name} weights{more}"
    return " and ".join(f"{n} matrices in {name}{more}" for (name, more), n in found.items())


def _form(weight: Weight) -> tuple[str, str]:
    """What a matrix is kept in, and what more is to be said of it."""
    if weight.bits == 16:
        return "bf16", ""
    more = f" in groups of {weight.group}" if weight.group else ""
    if weight.x_bits == 8:
        more += ", int8 activations" + (" in blocks" if weight.x_block else "")
    return f"int{weight.bits}", more
