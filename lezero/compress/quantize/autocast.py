"""Under which `torch.autocast` a layer is called: it computes as torch's own layers would, and is
compared and timed under the same one.

A model may turn it on in its own forward, so that a layer with weights in fp32 is given bf16.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Autocast:
    """What it casts to on a kind of device; `dtype` None: nothing, it is off."""

    device: str
    dtype: torch.dtype | None

    @classmethod
    def now(cls, place: torch.device) -> Autocast:
        kind = place.type
        on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return cls(kind, torch.get_autocast_dtype(kind) if on else None)

    @classmethod
    def off(cls, place: torch.device) -> Autocast:
        return cls(place.type, None)

    def again(self) -> AbstractContextManager[object]:
        """In it the same counts as when this was noted."""
        if self == Autocast.now(torch.device(self.device)):
            return nullcontext()
        return torch.autocast(self.device, self.dtype, enabled=self.dtype is not None)


class _Typed(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...


def cast(x: Tensor, weight: _Typed) -> Tensor:
    """`x` as torch's own linear layers and convolutions take it, so that outputs have their type:
    in autocast's, where it is on. Elsewhere 16 bits become fp32 for a weight in it, where
    torch would refuse them: a model that keeps a layer in fp32 casts by its weight's type, and only
    where that is a tensor (T5's `wo`)."""
    kind = x.device.type
    # torch.compile of 2.11 cannot follow the first question, and compiles for no other devices.
    known = kind == "cpu" or torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if not (known and torch.is_autocast_enabled(kind)):
        narrow = x.dtype is torch.float16 or x.dtype is torch.bfloat16
        return x.float() if narrow and weight.dtype == torch.float32 else x
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))
