"""What stands before and behind a decoder's layers in a step of one token a sequence, on NVIDIA.

Letters: B sequences, V vocabulary, K width. Each is one launch (`step.cu`).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lezero.ops.counts import counts
from lezero.ops.cuda_source import CudaKernel, kernel
from lezero.ops.linear.cuda_few import Normed, padded

_SOURCE = Path(__file__).with_name("step.cu")
_THREADS, _PARTS, _MOST = 256, 64, 64
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _compiled(name: str, x: Tensor, pad: int = 1) -> CudaKernel:
    half, kind = int(x.dtype == torch.float16), _KINDS.get(x.dtype, 0)
    return kernel(_SOURCE, name, x.device, {"HALF": half, "PAD": pad, "KIND": kind})


def chosen(token_B: Tensor, row_B: Tensor, best: Tensor) -> Tensor:
    """(B,) int64: a sequence's own token, or, where its row is not negative, that of `best`, the
    step before's; both lie apart alike."""
    out = torch.empty_like(best[: len(token_B)])
    count = ctypes.c_int(len(token_B))
    given = [token_B, row_B, best, out, ctypes.c_longlong(token_B.stride(0)), count]
    _compiled("chosen", best).launch(best.device, (1,), _THREADS, given, early=False)
    return out


def spread(x_BK: Tensor, norm_K: Tensor) -> Normed:
    """Tokens as the first layer takes them."""
    B, K = x_BK.shape
    assert norm_K.dtype == x_BK.dtype
    pad = padded(B)
    out = Normed(x_BK.new_empty(K // 16, pad, 16), x_BK.new_empty(1, B, dtype=torch.float32))
    given = [x_BK, norm_K, *out, ctypes.c_int(K)]
    _compiled("spread", x_BK, pad).launch(x_BK.device, (B,), _THREADS, given, early=True)
    return out


def best(logits_BV: Tensor, out_B: Tensor) -> None:
    """`best_token` of up to 64 rows (fp32 or 16 bits), written to the first of `out_B`."""
    B, V = logits_BV.shape
    assert B <= _MOST
    assert logits_BV.dtype in _KINDS
    place = logits_BV.device
    found = logits_BV.new_empty(B, _PARTS, dtype=torch.int64)
    given = [logits_BV, out_B, found, counts(place), ctypes.c_int(V)]
    _compiled("best", logits_BV).launch(place, (_PARTS, B), _THREADS, given, early=True)
