"""oneDNN's LSTM on the CPU, which keeps a workspace for backward that fake tensors leave empty."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

LSTM = "aten.mkldnn_rnn_layer.default"
_SAMPLES, _STEPS = 16, 17
_WIDEST = 512
_TRAIN = 15


def with_workspace(args: tuple[Any, ...], result: Any) -> Any:
    """The outputs of a layer with a workspace of its true size."""
    if not (args[_TRAIN] and torch.is_grad_enabled()):
        return result
    (length, samples, width), hidden = args[0].shape, args[10]
    size = _workspace_bytes(length, samples, width, hidden, args[0].dtype)
    return (*result[:3], torch.empty(size, dtype=torch.uint8, device=args[0].device))


def _workspace_bytes(length: int, samples: int, width: int, hidden: int, dtype: torch.dtype) -> int:
    """It grows with samples, time steps and width: small layers, which are run, tell how much."""
    narrower = max(1.0, max(width, hidden) / _WIDEST)
    sizes = max(1, round(width / narrower)), max(1, round(hidden / narrower))
    first, last = (_measured(steps, *sizes, dtype) for steps in (1, _STEPS))
    whole = first + (length - 1) * (last - first) / (_STEPS - 1)
    return round(whole * narrower * samples / _SAMPLES)


@functools.cache
def _measured(length: int, width: int, hidden: int, dtype: torch.dtype) -> int:
    with _disable_current_modes(), torch.enable_grad():
        made = functools.partial(torch.zeros, dtype=dtype)
        weights = made(4 * hidden, width), made(4 * hidden, hidden), made(4 * hidden)
        state = made(_SAMPLES, hidden)
        outputs = torch.ops.aten.mkldnn_rnn_layer(
            made(length, _SAMPLES, width), *weights, weights[2], state, state.clone(),
            False, [], 2, hidden, 1, True, False, False, True,
        )  # fmt: skip
        return int(outputs[3].numel())
