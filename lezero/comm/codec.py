"""Extension point: codecs, which turn a flat tensor into fewer bytes and back.

Who calls what when: a link asks `bytes` once for each buffer it makes, then for each exchange calls
`encode` on what this rank sends and `decode` on what came, on any rank in any order. A codec holds
no state (the error that a link keeps is an argument), so that one object serves all buffers.
Ranks with other processors or devices must make the same bytes of the same values.

    @codecs.register("half")
    class Half(Codec): ...

makes `codec("half")`, and `codec("half:7")` passes "7" to `Half.parse`. Plug-ins add theirs through
an entry point: group `lezero.plugins`, name `codec.<name>`. `tests/comm/codec_conformance.py` holds
the tests that a new codec inherits.

[Note: values that are not finite]
A NaN or infinity must stay visible after decoding: what it is decoded with may become NaN, but
nothing finite may take its place. The error of what was sent so stays what it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.core.registry import Registry

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What is encoded and decoded into."""
ERRORS = (torch.float32, torch.bfloat16)
"""How the error that encoding leaves may be kept."""


class Codec(ABC):
    """One codec with its options. `name` is whole ("int4:64"); `unbiased`: decoding gives the value
    on average, over the codec's own randomness."""

    name: str
    unbiased: bool = False

    @classmethod
    @abstractmethod
    def parse(cls, name: str, option: str) -> Codec:
        """The codec that "name:option" means ("" without one); `ConfigError` says what may be."""

    @abstractmethod
    def bytes(self, numel: int) -> int:
        """The exact size of the payload of `numel` elements, whatever their values."""

    @abstractmethod
    def encode(self, values: Tensor, payload: Tensor, error: Tensor | None = None) -> None:
        """Writes `payload` (uint8, `bytes(numel)`) from `values` (flat, contiguous, `FLOATS`).

        `error` (as many elements, `ERRORS`) is added to the values first, in fp32; afterwards it
        holds what decoding will miss. Raises `ConfigError` for other dtypes, sizes and layouts.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, add: bool = False) -> None:
        """Writes `out` (flat, contiguous, `FLOATS`), or adds to it in fp32, rounded once."""

    def check(self, payload: Tensor, numel: int) -> None:
        """Raises `ConfigError` for a payload of `numel` elements that `encode` cannot have written
        and `decode` must not read: one that came from elsewhere. Waits for an accelerator."""
        check_flat("payload", payload, self.bytes(numel), (torch.uint8,))

    @abstractmethod
    def bound(self, values: Tensor) -> Tensor:
        """The largest |decoded - value| there can be for each of finite `values` (fp32)."""

    def __repr__(self) -> str:
        return f"codec({self.name!r})"


codecs: Registry[type[Codec]] = Registry("codec", Codec)


def codec(name: str) -> Codec:
    """The codec called `name`: "none", "fp16", "bf16", "int8[:block]", "int4[:block]",
    "sign[:block]", "2:4-bf16", "2:4-int8[:block]", "2:4-int4[:block]", "topk:fraction" or one
    of a plug-in.

    Raises `ConfigError` for another name (with the nearest one) or option.
    """
    # Importing a family registers it; here, since each imports this file.
    import lezero.comm.block_codec
    import lezero.comm.cast_codec
    import lezero.comm.topk_codec  # noqa: F401

    if not isinstance(name, str):
        raise ConfigError(f"codec: got {name!r}, allowed is a name: {', '.join(codecs)}")
    for family in sorted(codecs, key=len, reverse=True):  # "2:4-int8" has a colon of its own
        if name == family or name.startswith(f"{family}:"):
            return codecs.get(family).parse(family, name[len(family) + 1 :])
    codecs.get(name)
    raise AssertionError("unreachable: an unknown name raises")


def check_flat(
    what: str, x: Tensor, numel: int | None = None, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """`ConfigError` unless `x` is flat, contiguous, of one of `dtypes` and has `numel` elements."""
    right = numel is None or x.numel() == numel
    if x.dtype in dtypes and x.dim() == 1 and x.is_contiguous() and right:
        return
    allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    layout = "a contiguous" if x.is_contiguous() else "a strided"
    shape = "one dim" if numel is None else f"shape ({numel},)"
    raise ConfigError(
        f"codec: {what} is {layout} {str(x.dtype).removeprefix('torch.')} tensor of shape "
        f"{tuple(x.shape)}; allowed is a contiguous {allowed} tensor of {shape}"
    )
