"""One token of each sequence through a model of 16-bit or whole-number weights, in few launches.

A layer is five: queries, keys and values; attention with the cache; its output; gate and up; down.
Norms, gates and residuals are parts of them. Layers with the same inputs are joined: their weights
become views of one matrix, so nothing is held twice.

Shapes: B sequences, D width, H heads, E numbers of a head, V vocabulary, T positions, W blocks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lezero.compress.quantize.modules import QuantizedEmbedding, QuantizedLinear
from lezero.compress.quantize.weights import PackedWeight
from lezero.core import device
from lezero.models import Transformer
from lezero.ops.linear import Packed

_KINDS = (torch.bfloat16, torch.float16)
_EARLY = (9, 0)
"""Compute capability from which a launch may begin before the one before it has ended."""


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
        version = device.capability()
        self._early = version is not None and version >= _EARLY
        self._layers = [
            (
                joined([a.q_proj, a.k_proj, a.v_proj]),
                joined([a.o_proj]),
                joined([block.mlp.gate_proj, block.mlp.up_proj]),
                joined([block.mlp.down_proj]),
            )
            for block in self._model.layers
            for a in (block.self_attn,)
        ]
        head = self._model.embed_tokens if model.lm_head is None else model.lm_head
        self._head = joined([head])
        self._heads, self._window, self._eps = c.heads, c.sliding_window, c.norm_eps

    @staticmethod
    def suits(model: Transformer) -> bool:
        """Whether kernels run all of it: on an NVIDIA device, with Triton."""
        c, place = model.config, model.norm.weight.device
        if place.type != "cuda" or importlib.util.find_spec("triton") is None:
            return False
        widths = (c.dim, c.ffn, c.heads * c.head_dim)
        even = c.head_dim in (32, 64, 128, 256) and not any(width % 32 for width in widths)
        return even and model.norm.weight.dtype in _KINDS and fits(model)

    def logits(
        self, token_B: Tensor, position_B: Tensor, table_BW: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """(B, V). `keys` and `values`, (layers, places, K, E), get those of the new tokens."""
        from lezero.ops.decoder.triton_attend import attend
        from lezero.ops.linear.triton_few import Around

        model, early = self._model, self._early
        around = Around(eps=self._eps, early=early)
        rope = model.rope
        x_BD = model.embed_tokens(token_B)
        for index, (block, products) in enumerate(zip(model.layers, self._layers, strict=True)):
            into, out, wide, narrow = products
            attention = block.self_attn
            norms = None
            if attention.q_norm is not None:
                norms = (attention.q_norm.weight, attention.k_norm.weight)
            qkv = multiply(x_BD, into, around._replace(norm=block.input_layernorm.weight))
            y = attend(
                *(qkv, rope.cos_TP, rope.sin_TP, position_B, table_BW, keys[index], values[index]),
                heads=self._heads,
                window=self._window,
                norms=norms,
                eps=self._eps,
                early=early,
            )
            x_BD = multiply(y, out, around._replace(residual=x_BD))
            norm = block.post_attention_layernorm.weight
            both = multiply(x_BD, wide, around._replace(norm=norm))
            x_BD = multiply(both, narrow, around._replace(gated=True, residual=x_BD))
        return multiply(x_BD, self._head, around._replace(norm=model.norm.weight))


def multiply(x: Tensor, product: Product, around: Any) -> Tensor:
    from lezero.ops.linear.triton_few import linear_few

    return linear_few(x, *product, around=around)


def fits(model: Transformer) -> bool:
    """Whether all layers have a form that the kernels read, those with the same inputs the same."""
    every: Any = model
    blocks = [(block.self_attn, block.mlp) for block in every.layers]
    groups = [[a.q_proj, a.k_proj, a.v_proj] for a, _ in blocks]
    groups += [[a.o_proj] for a, _ in blocks]
    groups += [[mlp.gate_proj, mlp.up_proj] for _, mlp in blocks]
    groups += [[mlp.down_proj] for _, mlp in blocks]
    groups.append([every.embed_tokens if every.lm_head is None else every.lm_head])
    forms = [[_form(layer, model.norm.weight.dtype) for layer in group] for group in groups]
    return all(None not in of and len(set(of)) == 1 for of in forms)


def _form(layer: Any, dtype: torch.dtype) -> tuple[Any, ...] | None:
    """What layers that are joined must have in common; None where no kernel reads it."""
    from lezero.ops.linear import triton_few

    hooks = layer._forward_hooks or layer._forward_pre_hooks
    biased = getattr(layer, "bias", None) is not None
    if type(layer) in (nn.Linear, nn.Embedding) and layer.weight.dtype == dtype and not hooks:
        return 16, layer.weight.shape[1], biased
    known = isinstance(layer, QuantizedLinear | QuantizedEmbedding) and not hooks
    if not known or not isinstance(layer.weight, PackedWeight) or layer.weight.packed.dim() != 2:
        return None
    grid, group = layer.weight.grid, layer.weight.group
    if getattr(layer, "x_bits", 16) != 16 or not triton_few.suits(dtype, grid.bits, group):
        return None
    kept = layer.weight.scale.dtype
    return grid.bits, group, grid.zero_point, kept, layer.weight.full_shape[1], biased


@torch.no_grad()
def joined(layers: Sequence[Any]) -> Product:
    """Layers with the same inputs as one product; their weights become views of its weight."""
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
