"""The op `lezero::packed_attention`. See `reference.py` for the formula and the letters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import index

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.packed_attention import reference
from lezero.ops.packed_attention.native import NATIVE
from lezero.ops.transforms import transformed

_library = torch.library.Library("lezero", "FRAGMENT")
_library.define(
    "packed_attention(Tensor q, Tensor k, Tensor v, int[] lengths, int heads) -> Tensor"
)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def packed_attention(
    q_ND: Tensor, k_ND: Tensor, v_ND: Tensor, lengths: Sequence[int], heads: int
) -> Tensor:
    """softmax(q kᵀ / sqrt(D / heads)) v within each text, (N, D) in the type of q.

    The tokens of all texts lie one after the other: text i has `lengths[i]` of the N rows, and no
    row is padding. Scores, softmax and sums are fp32, or fp64 for fp64. On the CPU a kernel takes
    fp32, bf16 and fp16 with heads whose width is a multiple of 16; what a text gets is then bit for
    bit the same whatever lies beside it. Where a gradient is needed, on other devices and for other
    widths torch's attention runs over padded groups of texts, and for other derivatives the formula
    itself. Raises `ConfigError` for shapes, types and lengths that do not fit.
    """
    q, k, v = q_ND, k_ND, v_ND
    try:
        lengths = [index(n) for n in lengths]
    except TypeError:
        said = f"{lengths!r:.80}"
        raise ConfigError(
            f"packed_attention: lengths are {said}; allowed are whole numbers"
        ) from None
    fits = q.dim() == 2 and q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype
    known = q.dtype in (*_TYPES, torch.float64) and q.device == k.device == v.device
    if not (fits and known) or heads < 1 or q.shape[1] % heads or not q.shape[1]:
        said = ", ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (q, k, v))
        raise ConfigError(
            f"packed_attention: got {said} with {heads} heads; allowed is (N, D) three times in "
            "fp32, bf16, fp16 or fp64, D a multiple of heads"
        )
    if any(n < 1 for n in lengths) or sum(lengths) != len(q):
        raise ConfigError(
            f"packed_attention: lengths add up to {sum(lengths)} of {len(q)} tokens, and "
            f"the shortest has {min(lengths, default=0)}; each has one token or more"
        )
    found: Tensor = torch.ops.lezero.packed_attention(q, k, v, lengths, heads)
    return found


def kernel_takes(q: Tensor, heads: int) -> bool:
    """Whether the native kernel computes for such queries: it may build it."""
    width = q.shape[1] // heads
    known = q.device.type == "cpu" and q.dtype in _TYPES and width % 16 == 0
    return known and NATIVE.available()


def _attend(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], heads: int) -> Tensor:
    if not kernel_takes(q, heads):
        return reference.by_groups(q, k, v, lengths, heads)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    begins = torch.tensor([0, *accumulate(lengths)], device="cpu")
    rows = (x if x.stride(1) == 1 else x.contiguous() for x in (q, k, v))
    NATIVE.ops.attend(*rows, begins, out, heads)
    return out


def _with_derivatives(
    keys: torch._C.DispatchKeySet,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    heads: int,
) -> Tensor:
    if transformed():
        return reference.packed_attention(q, k, v, lengths, heads)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):
        return reference.by_groups(q, k, v, lengths, heads)
    with torch._C._AutoDispatchBelowAutograd():
        below = keys & torch._C._after_autograd_keyset
        op = torch.ops.lezero.packed_attention.default
        found: Tensor = op.redispatch(below, q, k, v, lengths, heads)
    return found


def _fake(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], heads: int) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


_library.impl("packed_attention", _attend, "CompositeExplicitAutograd")
_library.impl("packed_attention", _with_derivatives, "Autograd", with_keyset=True)
torch.library.register_fake("lezero::packed_attention", _fake, lib=_library)
