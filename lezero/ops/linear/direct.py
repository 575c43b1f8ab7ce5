"""Which calls may go to a kernel past the dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def unseen(x: Tensor, bias: Tensor | None) -> bool:
    """Whether nobody derives, transforms, traces, compiles or watches a call on `x`, so that it may
    go straight to its kernel: the dispatcher and its steps in Python take as long as a small layer.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )
