"""Precision of a run: which dtype the matrix products use, and loss scaling where fp16 needs it.

Parameters and optimizer state stay fp32 in every precision, so the precision can change in mid-run
and nothing else has to: `fp32` computes plainly, `bf16` and `fp16` under `torch.autocast`, `fp16`
with a dynamic loss scale on top (Micikevicius et al., "Mixed Precision Training", 2018).
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal, get_args

import torch

from lezero.core import device
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.core.facts import instruction_sets

Name = Literal["auto", "fp32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NATIVE_BF16 = {"amx_bf16", "avx512_bf16", "bf16", "sve_bf16"}


def resolve(name: str, place: torch.device, decisions: Decisions, step: int = 0) -> str:
    """The precision to use: the user's, or from device facts for "auto"; a recorded decision.

    auto is bf16 where the hardware multiplies it natively (AMX or AVX512-BF16, an accelerator of
    compute capability 8 or more), fp16 on older GPUs, fp32 elsewhere.
    """
    if name not in get_args(Name):
        raise ConfigError(f"precision: got '{name}', allowed is {', '.join(get_args(Name))}")
    if name != "auto":
        return decisions.record("precision", name, overridden=True, reason="given", step=step)
    if place.type == "cpu":
        native = sorted(_NATIVE_BF16 & set(instruction_sets()))
        found, reason = (
            ("bf16", f"native bf16: {native[0]}") if native else ("fp32", "no bf16 unit")
        )
    else:
        version = device.capability()
        if version is None or version >= (8, 0):
            found, reason = "bf16", f"native bf16 on {place.type} {version or ''}".strip()
        else:
            found, reason = "fp16", f"compute capability {version[0]}.{version[1]} has no bf16"
    return decisions.record("precision", found, reason=reason, step=step)


class Precision:
    """Autocast and loss scale of one precision on one kind of device."""

    def __init__(self, name: str, place: torch.device) -> None:
        self.name, self.place = name, place
        self.scaler = torch.amp.GradScaler(place.type, enabled=name == "fp16")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context that a forward pass runs in."""
        dtype = _DTYPES.get(self.name)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.place.type, dtype=dtype)

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "scaler": self.scaler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.name == "fp16" and state["name"] == "fp16":
            self.scaler.load_state_dict(state["scaler"])
