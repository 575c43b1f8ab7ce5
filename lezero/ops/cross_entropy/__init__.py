"""Cross-entropy of next tokens, summed, in one pass over the logits each way.

`F.cross_entropy` keeps the log-probabilities of every token in fp32 and walks over the whole matrix
several times. This op works through it in pieces that stay in cache, keeps two numbers a row, and
rounds the gradient to the logits' dtype once. See `reference.py` for the formula. A gradient that
will be differentiated itself (`create_graph=True`) comes from plain operations instead, and so does
what is asked in forward mode or below `torch.func`.

The two numbers are the row's largest logit m and Σ exp(x - m). logsumexp(x) alone would be rounded
to the spacing of numbers near m: with logits of 10^4 probabilities lose five digits by it.

[Note: one piece of memory]
Pieces are computed in one buffer: the allocator gives blocks of their size back to the system and
faults them in again at every piece, which takes as long as the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.cross_entropy import reference
from lezero.ops.cross_entropy.reference import IGNORED
from lezero.ops.transforms import transformed

_PIECE = 1 << 18  # elements of a piece: 1 MiB in fp32

_library = torch.library.Library("lezero", "FRAGMENT")
_library.define("cross_entropy_sum(Tensor logits, Tensor targets) -> (Tensor, Tensor)")
_library.define(
    "cross_entropy_sum_backward(Tensor grad, Tensor logits, Tensor targets, Tensor parts) -> Tensor"
)


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Summed cross-entropy in nats of `logits_NV` against `targets_N`, in which -100 is ignored.

    Targets are int64 or int32. Returns a scalar in fp32 (fp64 for fp64 logits). Raises
    `ConfigError` for other shapes and types, for two devices and, on the CPU, for a target outside
    the vocabulary (in forward mode and below `torch.func` torch's own error).
    """
    if logits_NV.dim() != 2 or targets_N.shape != logits_NV.shape[:1]:
        raise ConfigError(
            f"cross_entropy_sum: got logits {tuple(logits_NV.shape)} and targets "
            f"{tuple(targets_N.shape)}, allowed is (N, V) and (N,)"
        )
    if targets_N.dtype not in (torch.int64, torch.int32):
        raise ConfigError(
            f"targets: got a tensor of {targets_N.dtype}, allowed are token ids in torch.int64 or "
            "torch.int32: give targets.long()"
        )
    if targets_N.device != logits_NV.device:
        raise ConfigError(
            f"cross_entropy_sum: targets is on {targets_N.device} and logits on "
            f"{logits_NV.device}; allowed is one device for both"
        )
    if transformed():
        return reference.cross_entropy_sum(logits_NV, targets_N)
    return torch.ops.lezero.cross_entropy_sum(logits_NV, targets_N)[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(logits_NV: Tensor) -> int:
    """Rows of a piece: small on the CPU for its cache, larger where launches cost."""
    per_piece = _PIECE if logits_NV.device.type == "cpu" else _PIECE * 64
    return max(1, per_piece // max(1, logits_NV.shape[1]))


def _forward(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    N, V = logits_NV.shape
    wide = _wide(logits_NV.dtype)
    if targets_N.device.type == "cpu" and N:
        bad_N = (targets_N >= V) | ((targets_N < 0) & (targets_N != IGNORED))
        if bool(bad_N.any()):
            first = int(targets_N[bad_N][0])
            raise ConfigError(
                f"targets: got target {first}, allowed is 0 to {V - 1} (the logits' vocabulary of "
                f"{V}), or {IGNORED} for one that does not count. Use the tokenizer that belongs "
                "to the model, or build the model with the tokenizer's number of tokens"
            )
    parts_2N = torch.empty(2, N, dtype=wide, device=logits_NV.device)
    for rows, below_NV in _pieces(logits_NV, wide):
        _, sum_N = part_2N = parts_2N[:, rows]
        part_2N[0] = logits_NV[rows].amax(1)
        _minus(logits_NV[rows], part_2N[0], below_NV)
        torch.sum(below_NV.exp_(), 1, out=sum_N)
    picked_N = logits_NV.gather(1, targets_N.clamp(min=0)[:, None])[:, 0].to(wide)
    nats_N = (parts_2N[0] - picked_N) + parts_2N[1].log()
    return torch.where(targets_N != IGNORED, nats_N, 0.0).sum(), parts_2N


def _pieces(logits_NV: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and memory for as many in `wide`. See [Note: one piece of memory]."""
    N, V = logits_NV.shape
    step = min(N, _rows(logits_NV))
    piece_NV = torch.empty(step, V, dtype=wide, device=logits_NV.device)
    for i in range(0, N, max(1, step)):
        yield slice(i, min(N, i + step)), piece_NV[: N - i]


def _minus(x_NV: Tensor, most_N: Tensor, out_NV: Tensor) -> None:
    if x_NV.dtype == out_NV.dtype:
        torch.sub(x_NV, most_N[:, None], out=out_NV)
    else:
        out_NV.copy_(x_NV).sub_(most_N[:, None])


def _backward(grad: Tensor, logits_NV: Tensor, targets_N: Tensor, parts_2N: Tensor) -> Tensor:
    out_NV = torch.empty_like(logits_NV)
    most_N, sum_N = parts_2N
    scale_N = torch.where(targets_N != IGNORED, grad.to(parts_2N.dtype), 0.0)
    index_N1 = targets_N.clamp(min=0)[:, None].long()
    for rows, p_NV in _pieces(logits_NV, parts_2N.dtype):
        _minus(logits_NV[rows], most_N[rows], p_NV)
        p_NV.exp_().mul_((scale_N[rows] / sum_N[rows])[:, None])
        p_NV.scatter_add_(1, index_N1[rows], -scale_N[rows, None])
        out_NV[rows] = p_NV
    return out_NV


def _recorded_backward(
    grad: Tensor, logits_NV: Tensor, targets_N: Tensor, wide: torch.dtype
) -> Tensor:
    """`_backward` of operations that autograd can differentiate again, and whole in `wide`."""
    index_N1 = targets_N.clamp(min=0)[:, None].long()
    p_NV = logits_NV.to(wide).softmax(1)
    p_NV = p_NV.scatter_add(1, index_N1, p_NV.new_full(index_N1.shape, -1.0))
    scale_N = torch.where(targets_N != IGNORED, grad.to(wide), 0.0)
    return (p_NV * scale_N[:, None]).to(logits_NV.dtype)


def _fake_forward(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    wide = _wide(logits_NV.dtype)
    return logits_NV.new_empty((), dtype=wide), logits_NV.new_empty(
        (2, logits_NV.shape[0]), dtype=wide
    )


def _fake_backward(grad: Tensor, logits_NV: Tensor, targets_N: Tensor, parts_2N: Tensor) -> Tensor:
    return torch.empty_like(logits_NV)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
    logits_NV, targets_N, parts_2N = ctx.saved_tensors
    if torch.is_grad_enabled():  # autograd records this: create_graph
        return _recorded_backward(grad, logits_NV, targets_N, parts_2N.dtype), None
    return torch.ops.lezero.cross_entropy_sum_backward(grad, logits_NV, targets_N, parts_2N), None


_library.impl("cross_entropy_sum", _forward, "CompositeExplicitAutograd")
_library.impl("cross_entropy_sum_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("lezero::cross_entropy_sum", _fake_forward, lib=_library)
torch.library.register_fake("lezero::cross_entropy_sum_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "lezero::cross_entropy_sum", _differentiate, setup_context=_save, lib=_library
)
