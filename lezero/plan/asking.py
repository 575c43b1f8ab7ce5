"""What an engine asks a model before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

from lezero.nn.modes import evaluating
from lezero.ops.cross_entropy.reference import IGNORED
from lezero.plan.spec import PRECISIONS, StepSpec


def ask(model: nn.Module, spec: StepSpec, batch: Any) -> None:
    """The two passes that find out whether it shifts labels by token (`train/counting.py`). They
    leave holes in the heap. A model that cannot be asked is trained by one who says how to count.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or not _whole(labels.dtype):
        return
    dtype = PRECISIONS[spec.precision]
    cast = torch.autocast(spec.device, dtype=dtype) if dtype else nullcontext()
    with suppress(Exception), torch.no_grad(), evaluating(model), cast:
        nothing = torch.full_like(labels, IGNORED)
        for each in (nothing.clone(), nothing):
            spec.mean_loss(model, {**batch, "labels": each})


def _whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
