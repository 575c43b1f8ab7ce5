"""One token of each sequence through a model of 16-bit or whole-number weights, in few launches.

A layer is five: queries, keys and values; attention with the cache; its output; gate and up, and
what the gate leaves; down. Norms and residuals are parts of them, and each launch begins, and asks
for its weights, or keys and values, before the one ahead of it has ended (`cuda_few.py`,
`cuda_attend.py`). More than 16 sequences, other
shapes and AMD's devices take Triton's kernels: six launches a layer, one after another. Layers with
the same inputs are joined: their weights become views of one matrix, so nothing is held twice.
Where their forms differ, each form has a launch of its own.

Shapes: B sequences, D width, H heads, E numbers of a head, V vocabulary, T positions, W blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lezero.compress.quantize.modules import QuantizedEmbedding, QuantizedLinear
from lezero.compress.quantize.weights import PackedWeight
from lezero.models import Transformer
from lezero.ops import cuda_source
from lezero.ops.decoder import cuda_attend, cuda_step
from lezero.ops.linear import Packed, cuda_few
from lezero.ops.triton_runs import triton_runs

_KINDS = (torch.bfloat16, torch.float16)


class Product(NamedTuple):
    """A weight as `linear_few` takes it."""

    weight: Packed
    bias: Tensor | None
    out_features: int
    in_features: int
    bits: int
    group: int


class Decoder:
    """Of a model that `suits`; its layers go on to work, with weights that are views."""

    def __init__(self, model: Transformer) -> None:
        self._model: Any = model
        c = self.config = model.config
        dtype = model.norm.weight.dtype
        *products, self._head = (products_of(some, dtype) for some in _same_inputs(model))
        self._layers = [products[i : i + 4] for i in range(0, len(products), 4)]
        self._heads, self._window, self._eps = c.heads, c.sliding_window, c.norm_eps
        self.slices = cuda_source.runs(model.norm.weight.device) and self._sliceable(dtype)
        shape = (cuda_few.MOST_TOKENS, c.heads, c.kv_heads, c.head_dim)
        norms = [norm for norm in map(_norms, model.layers) if norm is not None]
        self.attends = cuda_attend.suits(dtype, *shape) and cuda_attend.aligned(norms)
        """Whether `cuda_attend.py` has a kernel, which steps in slices take"""
        self.prefers_triton = False
        """and not Triton's, unless this says so."""

    def in_slices(self, sequences: int) -> bool:
        """Whether a step of so many takes the kernels of `cuda_few.py`."""
        return self.slices and sequences <= cuda_few.MOST_TOKENS

    def attends_to(self, sequences: int) -> bool:
        """Whether such a step may take the attention of `cuda_attend.py`."""
        return self.in_slices(sequences) and self.attends

    @staticmethod
    def suits(model: Transformer) -> bool:
        """Whether kernels run all of it: on an NVIDIA device, with Triton."""
        c, place = model.config, model.norm.weight.device
        if not triton_runs(place):
            return False
        widths = (c.dim, c.ffn, c.heads * c.head_dim)
        even = c.head_dim in (32, 64, 128, 256) and not any(width % 32 for width in widths)
        return even and model.norm.weight.dtype in _KINDS and fits(model)

    def logits(
        self, token_B: Tensor, position_B: Tensor, table_BW: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """(B, V). `keys` and `values`, (layers, places, K, E), get those of the new tokens."""
        if self.in_slices(len(token_B)):
            return self._in_slices(token_B, position_B, table_BW, keys, values)
        from lezero.ops.decoder.triton_attend import attend
        from lezero.ops.linear.triton_few import Around

        model, rope, around = self._model, self._model.rope, Around(eps=self._eps)
        x_BD = model.embed_tokens(token_B)
        for index, (block, products) in enumerate(zip(model.layers, self._layers, strict=True)):
            into, out, wide, narrow = products
            qkv = multiply(x_BD, into, around._replace(norm=block.input_layernorm.weight))
            y = attend(
                *(qkv, rope.cos_TP, rope.sin_TP, position_B, table_BW, keys[index], values[index]),
                heads=self._heads,
                window=self._window,
                norms=_norms(block),
                eps=self._eps,
            )
            x_BD = multiply(y, out, around._replace(residual=x_BD))
            norm = block.post_attention_layernorm.weight
            both = multiply(x_BD, wide, around._replace(norm=norm))
            x_BD = multiply(both, narrow, around._replace(gated=True, residual=x_BD))
        return multiply(x_BD, self._head, around._replace(norm=model.norm.weight))

    def _sliceable(self, dtype: torch.dtype) -> bool:
        """Whether `cuda_few.py` has kernels for all products but the head's."""
        every = list(chain.from_iterable(chain.from_iterable(self._layers)))
        return all(len(wide) == 1 for _, _, wide, _ in self._layers) and all(
            _suits_slices(dtype, one) for one in every
        )

    def _in_slices(
        self, token_B: Tensor, position_B: Tensor, table_BW: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """`logits` by `cuda_few.py`."""
        attend: Any = cuda_attend.attend
        if not self.attends or self.prefers_triton:
            from lezero.ops.decoder.triton_attend import attend

        model, rope, eps, B = self._model, self._model.rope, self._eps, len(token_B)
        blocks, pad = list(model.layers), cuda_few.padded(B)
        after = [*(block.input_layernorm.weight for block in blocks[1:]), model.norm.weight]
        x_BD = model.embed_tokens(token_B)
        normed = cuda_step.spread(x_BD, blocks[0].input_layernorm.weight)
        for index, (block, products) in enumerate(zip(blocks, self._layers, strict=True)):
            into, (out,), (wide,), (narrow,) = products
            y = attend(
                _outputs(normed, B, into, eps),
                *(rope.cos_TP, rope.sin_TP, position_B, table_BW, keys[index], values[index]),
                heads=self._heads,
                window=self._window,
                norms=_norms(block),
                eps=eps,
                pad=pad,
            )
            norm = block.post_attention_layernorm.weight
            x_BD, normed = cuda_few.linear_normed(y, B, *out, residual=x_BD, norm=norm)
            gated = cuda_few.linear_few(normed, B, *wide, eps=eps, gated=True)
            x_BD, normed = cuda_few.linear_normed(
                gated, B, *narrow, residual=x_BD, norm=after[index]
            )
        if all(_suits_slices(x_BD.dtype, one) for one in self._head):
            return _outputs(normed, B, self._head, eps)
        from lezero.ops.linear.triton_few import Around

        return multiply(x_BD, self._head, Around(norm=model.norm.weight, eps=eps))


def _norms(block: Any) -> tuple[Tensor, Tensor] | None:
    """Weights of a layer's norms of queries and keys, where it has them."""
    attention = block.self_attn
    return None if attention.q_norm is None else (attention.q_norm.weight, attention.k_norm.weight)


def _suits_slices(dtype: torch.dtype, one: Product) -> bool:
    known = cuda_few.suits(dtype, one.in_features, one.bits, one.group)
    return known and cuda_few.aligned(one.weight)


def _outputs(normed: Any, B: int, products: Sequence[Product], eps: float) -> Tensor:
    found = [cuda_few.linear_few(normed, B, *product, eps=eps) for product in products]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def multiply(x: Tensor, products: Sequence[Product], around: Any) -> Tensor:
    """The outputs of all products, side by side."""
    from lezero.ops.linear.triton_few import linear_few

    found = [linear_few(x, *product, around=around) for product in products]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def fits(model: Transformer) -> bool:
    """Whether all layers have a form that the kernels read."""
    dtype = model.norm.weight.dtype
    return None not in {_form(layer, dtype) for some in _same_inputs(model) for layer in some}


def _same_inputs(model: Transformer) -> list[list[Any]]:
    """Layers whose inputs are the same: four lists a block, and at last that of the head."""
    every: Any = model
    found = []
    for block in every.layers:
        attention, mlp = block.self_attn, block.mlp
        found.append([attention.q_proj, attention.k_proj, attention.v_proj])
        found.append([attention.o_proj])
        found.append([mlp.gate_proj, mlp.up_proj])
        found.append([mlp.down_proj])
    return [*found, [every.embed_tokens if every.lm_head is None else every.lm_head]]


def _form(layer: Any, dtype: torch.dtype) -> tuple[Any, ...] | None:
    """What layers that are joined must have in common; None where no kernel reads it."""
    from lezero.ops.linear import triton_few

    biased = getattr(layer, "bias", None) is not None
    if type(layer) in (nn.Linear, nn.Embedding) and layer.weight.dtype == dtype:
        return (16, layer.weight.shape[1], biased) if layer.weight.is_contiguous() else None
    known = isinstance(layer, QuantizedLinear | QuantizedEmbedding)
    # Of a subclass the codes alone do not say what it multiplies: inputs in GPTQ's order, say.
    if not known or type(layer.weight) is not PackedWeight or layer.weight.packed.dim() != 2:
        return None
    grid, group = layer.weight.grid, layer.weight.group
    if getattr(layer, "x_bits", 16) != 16 or not triton_few.suits(dtype, grid.bits, group):
        return None
    kept = layer.weight.scale.dtype
    return grid.bits, group, grid.zero_point, kept, layer.weight.full_shape[1], biased


def products_of(layers: Sequence[Any], dtype: torch.dtype) -> list[Product]:
    """Layers with the same inputs: as one product, or, where neighbours have no form in common (in
    a GGUF file, say), as several."""
    return [joined(list(some)) for _, some in groupby(layers, lambda layer: _form(layer, dtype))]


@torch.no_grad()
def joined(layers: Sequence[Any]) -> Product:
    """Layers of one form as one product; their weights become views of its weight."""
    N, K = sum(int(layer.weight.shape[0]) for layer in layers), int(layers[0].weight.shape[1])
    held = [layer.weight for layer in layers]
    biases = [getattr(layer, "bias", None) for layer in layers]
    bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
    if not isinstance(held[0], PackedWeight):
        wide = _one([weight.data for weight in held])
        for layer, part in zip(layers, _split(wide, held), strict=True):
            layer.weight.data = part
        return Product(Packed(wide, wide, None), bias, N, K, 16, 0)
    parts = [weight.parts() for weight in held]
    packed, scale, zero = (
        None if some[0] is None else _one(some) for some in map(list, zip(*parts, strict=True))
    )
    assert packed is not None
    assert scale is not None
    names = ("packed", "scale", "zero")
    for name, whole in zip(names, (packed, scale, zero), strict=True):
        if whole is not None:
            for weight, part in zip(held, _split(whole, held), strict=True):
                setattr(weight, name, part)
    return Product(Packed(packed, scale, zero), bias, N, K, held[0].grid.bits, held[0].group)


def _one(parts: list[Any]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(whole: Tensor, held: Sequence[Any]) -> tuple[Tensor, ...]:
    return whole.split([int(weight.shape[0]) for weight in held])
