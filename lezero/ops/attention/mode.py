"""Gives a faster attention to any model, without a change of the model.

    with FastAttention():
        loss = model(tokens).loss
    loss.backward()

[Note: what is redirected]
Only calls of `torch.nn.functional.scaled_dot_product_attention` that the kernel does better: on
the CPU, in bf16 (or in fp32 under bf16 autocast, which would cast them), for training (a gradient
is needed, not in forward mode nor below `torch.func`), with no mask, no dropout, a head dim that is
a multiple of 32 and enough heads for the threads. Any other call, and every other function, goes
where it went before. Where activations are recomputed in the backward pass, run that by `backward`
within the mode, so that both passes take the same way: torch hands `loss.backward()` to the mode,
and leaves it for as long as that runs.

[Note: few heads on many cores]
The kernel splits its work by sample and key/value head, torch's also by query. With few heads on
many cores torch's may win, although each of its threads is about four times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lezero.ops.attention import native
from lezero.ops.attention.op import HEAD_DIMS, shapes_fit
from lezero.ops.transforms import transformed

_SDPA = F.scaled_dot_product_attention


class FastAttention(TorchFunctionMode):
    """Redirects what fits to `lezero::attention` while it is on; nothing where it cannot run.

    Making one builds the kernel if this machine has not built it yet (a few seconds, once).
    """

    def __init__(self) -> None:
        super().__init__()
        self.on = native.available()
        self.threads = torch.get_num_threads()  # here, since torch.compile cannot trace it

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA and self.on:
            return _attend(self.threads, *args, **kwargs)
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
            # Its Python body calls super(), which Dynamo cannot trace below a mode.
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)


def backward(loss: Tensor) -> None:
    """`loss.backward()` of a scalar, during which a mode that is on stays on."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def scaled_dot_product_attention(
    q_BHME: Tensor, k_BGNE: Tensor, v_BGNE: Tensor, *, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / √E) v by the fastest way there is: ours where it fits, else torch's.

    H may be a multiple of G (grouped-query attention).
    """
    gqa = q_BHME.shape[-3] != k_BGNE.shape[-3]
    if native.available():
        threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()
        return _attend(threads, q_BHME, k_BGNE, v_BGNE, is_causal=causal, enable_gqa=gqa)
    return _SDPA(q_BHME, k_BGNE, v_BGNE, is_causal=causal, enable_gqa=gqa)


def _attend(
    threads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if (
        attn_mask is None
        and dropout_p == 0.0
        and (scale is None or scale > 0)
        and _computed_in_bf16(query, key, value)
        and torch.is_grad_enabled()
        and not transformed()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
        and shapes_fit(query, key, value)
        and query.shape[3] in HEAD_DIMS
        and (enable_gqa or query.shape[1] == key.shape[1])
        # See [Note: few heads on many cores].
        and 2 * query.shape[0] * key.shape[1] >= threads
    ):
        narrow = (x.to(torch.bfloat16) for x in (query, key, value))
        factor = query.shape[3] ** -0.5 if scale is None else scale
        out: Tensor = torch.ops.lezero.attention(*narrow, is_causal, factor)[0]
        return out
    return _SDPA(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _computed_in_bf16(query: Tensor, key: Tensor, value: Tensor) -> bool:
    tensors = (query, key, value)
    if any(x.device.type != "cpu" for x in tensors):
        return False
    if all(x.dtype == torch.bfloat16 for x in tensors):
        return True
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    return autocast == torch.bfloat16 and all(
        x.dtype in (torch.bfloat16, torch.float32) for x in tensors
    )
