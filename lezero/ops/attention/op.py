"""The op `lezero::attention` and its gradient. See `reference.py` for the formula.

Letters: B batch, H query heads, G key and value heads, M queries, N keys, E head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.attention import native, reference
from lezero.ops.transforms import transformed

_library = torch.library.Library("lezero", "FRAGMENT")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "bool causal, float scale) -> (Tensor, Tensor, Tensor)"
)

HEAD_DIMS = range(32, 257, 32)


def attention(
    q_BHME: Tensor, k_BGNE: Tensor, v_BGNE: Tensor, *, causal: bool, scale: float | None = None
) -> Tensor:
    """softmax(scale · q kᵀ) v; with `causal`, query m sees keys 0 … m. `scale` is E^-½ by default.

    Scores, softmax and sums are fp32. The output is (B, H, M, E) over memory of (B, M, H, E), so
    that `.transpose(1, 2).flatten(2)` copies nothing. Raises `ConfigError` for other shapes, mixed
    dtypes and mixed devices. Where the native kernel does not serve, the formula itself runs: slow,
    and it keeps all scores; `scaled_dot_product_attention` chooses better. It runs too for second
    derivatives, in forward mode and below `torch.func`.
    """
    q, k, v = q_BHME, k_BGNE, v_BGNE
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    if not (alike and shapes_fit(q, k, v)):
        given = zip("qkv", (q, k, v), strict=True)
        raise ConfigError(
            "attention: got "
            + ", ".join(f"{name} {x.dtype} {tuple(x.shape)} on {x.device}" for name, x in given)
            + "; allowed is (B, H, M, E), (B, G, N, E) twice, H a multiple of G, one dtype and "
            "one device"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if transformed():
        with torch.autocast(q.device.type, enabled=False):
            return reference.attention(q, k, v, causal, scale)
    return torch.ops.lezero.attention(q, k, v, causal, scale)[0]


def shapes_fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True for (B, H, M, E), (B, G, N, E), (B, G, N, E) with H a multiple of G, none of them 0."""
    return (
        q.dim() == k.dim() == 4
        and k.shape == v.shape
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and 0 not in q.shape
        and 0 not in k.shape
        and q.shape[1] % k.shape[1] == 0
    )


def kernel_takes(q: Tensor) -> bool:
    """True where the native kernel computes for such queries (shapes fit): it may build it."""
    return (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and q.shape[3] in HEAD_DIMS
        and native.available()
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _like(x_BHME: Tensor) -> Tensor:
    B, H, M, E = x_BHME.shape
    return x_BHME.new_empty((B, M, H, E)).transpose(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _fake_forward(q, k, v, causal, scale)
    if kernel_takes(q) and scale > 0:
        rows = (_rows(q), _rows(k), _rows(v))
        native.NATIVE.ops.forward(*rows, out, lse, causal, scale)
        return out, lse
    with torch.autocast(q.device.type, enabled=False):
        plain, lse = reference.attention_and_lse(q, k, v, causal, scale)
    return out.copy_(plain), lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _like(q), _like(k), _like(v)
    if kernel_takes(q) and scale > 0:
        rows = [_rows(x) for x in (grad, q, k, v)]
        native.NATIVE.ops.backward(*rows, out, lse, *grads, causal, scale)
        return grads
    with torch.autocast(q.device.type, enabled=False):
        plain = reference.attention_backward(grad, q, k, v, out, lse, causal, scale)
    for to, found in zip(grads, plain, strict=True):
        to.copy_(found)
    return grads


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _like(q), q.new_empty(q.shape[:3], dtype=wide)


def _fake_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    if torch.is_grad_enabled():  # autograd records this: create_graph
        q, k, v, *_ = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            made = reference.attention_and_lse(q, k, v, ctx.causal, ctx.scale)
            again = reference.attention_backward(grad, q, k, v, *made, ctx.causal, ctx.scale)
        return *again, None, None
    found = torch.ops.lezero.attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *found, None, None


_library.impl("attention", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("lezero::attention", _fake_forward, lib=_library)
torch.library.register_fake("lezero::attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "lezero::attention", _differentiate, setup_context=_save, lib=_library
)
