"""What a quantized tensor's codes mean: number format, who shares a scale, zero point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lezero.core.errors import ConfigError

Format = Literal["int8", "int4", "fp8", "nf4"]
FORMATS = ("int8", "int4", "fp8", "nf4")
SCALE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

LEVELS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "nf4": 1.0}
"""What the largest magnitude of a group becomes, without a zero point."""
MIDDLE = {"int8": 128, "int4": 8}
"""The zero point of symmetric codes, where they are counted from 0."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of nf4's codes: Dettmers et al., "QLoRA" (2023), arXiv:2305.14314, appendix E."""


@dataclass(frozen=True)
class Grid:
    """The points that values are rounded to.

    `group`: how many neighbours along the last dim share a scale, or "row" (all of them: per
    channel for a weight of (N, K), per token for activations), or "tensor". The last group of a
    row may be shorter. `zero_point`: int8 and int4 only; each group then also has a zero point, a
    code between 0 and the highest one. `scale_dtype`: what scales are rounded to before codes are
    found, so that storing them in it loses nothing.

    Raises `ConfigError` for anything else.
    """

    format: Format
    group: int | Literal["row", "tensor"] = "row"
    zero_point: bool = False
    scale_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"grid format {self.format!r}; allowed: {', '.join(FORMATS)}")
        sized = isinstance(self.group, int) and self.group >= 1
        if not sized and self.group not in ("row", "tensor"):
            raise ConfigError(
                f"grid group {self.group!r}; allowed: a count of elements, 'row', 'tensor'"
            )
        if self.zero_point and not self.is_integer:
            raise ConfigError(f"{self.format} has no zero point; int8 and int4 may have one")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ConfigError(
                f"grid scale_dtype {self.scale_dtype!r}; allowed: {', '.join(SCALE_DTYPES)}"
            )

    @property
    def is_integer(self) -> bool:
        return self.format in MIDDLE

    @property
    def bits(self) -> int:
        return 4 if self.format in ("int4", "nf4") else 8

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest code of an integer format; others have no order of equal steps."""
        assert self.is_integer, self.format
        if self.format == "int8":
            return (0, 255) if self.zero_point else (-127, 127)
        return 0, 15

    @property
    def middle(self) -> int:
        """The code of 0 without a zero point: 8 for int4, which counts from 0; else 0."""
        return 8 if self.format == "int4" and not self.zero_point else 0

    @property
    def code_dtype(self) -> torch.dtype:
        if self.format == "fp8":
            return torch.float8_e4m3fn
        return torch.int8 if self.format == "int8" and not self.zero_point else torch.uint8

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of the scales (and zero points) of a tensor of `shape`."""
        if self.group == "tensor":
            return (1,) * len(shape)
        size = shape[-1] if self.group == "row" else self.group
        return (*shape[:-1], -(-shape[-1] // size) if size else 0)
