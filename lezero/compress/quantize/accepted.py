"""Which types the kernels of quantized weights take and give, and what to do about others."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.linear.op import FLOATS


def check_type(x: Tensor, form: str) -> None:
    """Raises `ConfigError` where the kernels of a weight in `form` do not take `x`'s type, or `x`
    is nested: an encoder goes on to make such batches where a part of it alone was quantized."""
    if x.is_nested:
        raise ConfigError(
            f"input: got a nested tensor, which a weight in {form} does not take; set "
            "use_nested_tensor = False on the nn.TransformerEncoder that holds the layer, or build "
            "it with enable_nested_tensor=False"
        )
    if x.dtype not in FLOATS:
        raise ConfigError(
            f"input: got {x.dtype}, allowed for a weight in {form} are fp32, bf16 and fp16; "
            "convert the input, as with x.float(), and a model that was made fp64 with "
            "model.float()"
        )


def check_rows(dtype: torch.dtype, form: str) -> None:
    """Raises `ConfigError` where no kernel decodes a weight in `form` to `dtype`."""
    if dtype not in FLOATS:
        raise ConfigError(
            f"embedding: its rows would be {dtype}, allowed for a weight in {form} are fp32, bf16 "
            "and fp16; convert a model that was made fp64 with model.float()"
        )
