"""The ops `lezero::codec_encode` and `codec_decode`. See `reference.py` for the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.codec import native, reference
from lezero.ops.codec.layout import BLOCKS, FORMS, Layout
from lezero.ops.triton_runs import triton_runs

_library = torch.library.Library("lezero", "FRAGMENT")
_library.define(
    "codec_encode(Tensor values, Tensor(a!) payload, Tensor(b!)? error, str form, int block) -> ()"
)
_library.define("codec_decode(Tensor payload, Tensor(a!) out, str form, int block, bool add) -> ()")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What is encoded and decoded into."""
_KERNEL_TYPES = (torch.float32, torch.bfloat16)


def payload_bytes(form: str, numel: int, block: int) -> int:
    """The exact size of a payload in bytes."""
    return Layout(form, numel, block).total


def encode(
    values: Tensor, payload: Tensor, error: Tensor | None = None, *, form: str, block: int
) -> None:
    """Encodes `values` (flat fp32, bf16 or fp16) into `payload` (uint8, `payload_bytes` of it).

    `error` (fp32 or bf16, as many elements) is added first, in fp32, and then holds what encoding
    lost: one pass over memory. Equal bytes from every kernel and device. Raises `ConfigError` for
    other dtypes, sizes and layouts, and for tensors on several devices.
    """
    _check(values, payload, form, block)
    if error is not None:
        _flat("error", error, _KERNEL_TYPES, values.numel())
        _beside("error", error, values)
    torch.ops.lezero.codec_encode(values, payload, error, form, block)


def decode(payload: Tensor, out: Tensor, *, form: str, block: int, add: bool = False) -> None:
    """Decodes into `out` (flat fp32, bf16 or fp16), or adds to it, in fp32, rounded once."""
    _check(out, payload, form, block)
    torch.ops.lezero.codec_decode(payload, out, form, block, add)


def _check(values: Tensor, payload: Tensor, form: str, block: int) -> None:
    if form not in FORMS or block not in BLOCKS:
        raise ConfigError(
            f"codec form {form!r} in blocks of {block}; forms: {', '.join(FORMS)}; "
            f"blocks: {', '.join(map(str, BLOCKS))}"
        )
    _flat("values", values, FLOATS, values.numel())
    _flat("payload", payload, (torch.uint8,), payload_bytes(form, values.numel(), block))
    _beside("payload", payload, values)


def _flat(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], numel: int) -> None:
    if x.dtype in dtypes and x.dim() == 1 and x.is_contiguous() and x.numel() == numel:
        return
    allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    layout = "contiguous" if x.is_contiguous() else "strided"
    raise ConfigError(
        f"codec {name}: got {layout} {x.dtype} {tuple(x.shape)}; "
        f"allowed is a contiguous {allowed} tensor of shape ({numel},)"
    )


def _beside(name: str, x: Tensor, values: Tensor) -> None:
    if x.device != values.device:
        raise ConfigError(
            f"codec {name}: it is on {x.device} and the values are on {values.device}; "
            "allowed is one device for all"
        )


def _encode(values: Tensor, payload: Tensor, error: Tensor | None, form: str, block: int) -> None:
    if values.dtype == torch.float16:
        values = values.float()
    if values.device.type == "cpu" and native.NATIVE.available():
        native.NATIVE.ops.encode(values, payload, error, FORMS.index(form), block)
    elif triton_runs(values.device):
        from lezero.ops.codec import triton_kernel

        triton_kernel.encode(values, payload, error, form, block)
    else:
        reference.encode(values, payload, error, form, block)


def _decode(payload: Tensor, out: Tensor, form: str, block: int, add: bool) -> None:
    if out.dtype == torch.float16:
        wide = out.float()
        _decode(payload, wide, form, block, add)
        out.copy_(wide)
    elif out.device.type == "cpu" and native.NATIVE.available():
        native.NATIVE.ops.decode(payload, out, FORMS.index(form), block, add)
    elif triton_runs(out.device):
        from lezero.ops.codec import triton_kernel

        triton_kernel.decode(payload, out, form, block, add)
    else:
        reference.decode(payload, out, form, block, add)


def _fake_encode(
    values: Tensor, payload: Tensor, error: Tensor | None, form: str, block: int
) -> None:
    return None


def _fake_decode(payload: Tensor, out: Tensor, form: str, block: int, add: bool) -> None:
    return None


_library.impl("codec_encode", _encode, "CompositeExplicitAutograd")
_library.impl("codec_decode", _decode, "CompositeExplicitAutograd")
torch.library.register_fake("lezero::codec_encode", _fake_encode, lib=_library)
torch.library.register_fake("lezero::codec_decode", _fake_decode, lib=_library)
