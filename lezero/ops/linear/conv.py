"""The op `lezero::conv_int8`: int8 convolution by oneDNN, which torch brings for x86 processors.

    a = clamp(round(x / t) + u, 0, 255);  y = t · s_n · Σ (a - u) w + bias_n

with a scale s for each output channel, and t, u for the whole input (static, from a calibration).
Elsewhere, and for what oneDNN does not take, the formula runs in fp32.

[Note: only with VNNI]
On x86 processors without it, oneDNN adds pairs of products in 16 bits and cuts off what does not
fit: 255 · 127 · 2 is twice too large. Its result would be wrong without a word, so it is not asked;
nor where `ONEDNN_MAX_CPU_ISA` keeps it from using what the processor has.

[Note: what it gets wrong]
Drawn shapes against the formula (torch 2.13, AVX512-VNNI) found three kinds that it gives garbage
for, or ends the process: one input channel, alone or where a group makes several of one; and
padding with dilation, or as wide as the kernel, where the input is narrow. The first runs by the
formula; for the others the codes are padded before they are given to it.

[Note: packed once]
oneDNN wants weights in a layout of its own, which is opaque and cannot be saved. The op takes plain
int8 weights and keeps oneDNN's copy as long as the weight tensor lives and is not written to. Of a
tensor made in inference mode torch does not count the writes; it is taken to stay as it is.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv1d_input, conv2d_input
from torch.utils.weak import WeakIdKeyDictionary

from lezero.core.errors import ConfigError
from lezero.core.facts import instruction_sets
from lezero.ops.image_codes import image_codes
from lezero.ops.linear.checks import check_devices
from lezero.ops.linear.derivatives import differentiate

_library = torch.library.Library("lezero", "FRAGMENT")
_library.define(
    "conv_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor x_scale, Tensor x_zero, "
    "int[] stride, int[] padding, int[] dilation, int groups, bool channels_last) -> Tensor"
)
_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
_MOST_INPUTS = 1 << 16  # of an output: 255 · 127 of each fit in the 32 bits of a sum
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def conv_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor,
    x_zero: Tensor,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    channels_last: bool = False,
) -> Tensor:
    """Convolution of one or two dims in int8: x (B, C, …) → (B, O, …) in x's dtype.

    `weight`: int8 (O, C / groups, …), symmetric, with fp32 `scale` (O,). `x_scale` (fp32) and
    `x_zero` (0 … 255): one element each. `stride`, `padding`, `dilation`: a number a dim. y lies in
    memory as x does: channels last, or contiguous where x is that (too) or neither; with
    `channels_last` images lie so anyway, as torch's with a weight that does. A sample with a NaN or
    an infinity gives NaN. Differentiable in x and bias, as if x had not been rounded. Raises
    `ConfigError` for shapes, dtypes and devices that do not fit.
    """
    given = {"weight": weight, "scale": scale, "bias": bias, "x_scale": x_scale, "x_zero": x_zero}
    check_devices("conv_int8", x=x, **given)
    dims = weight.dim() - 2
    shapes = x.dim() == weight.dim() and tuple(scale.shape) == weight.shape[:1] and dims in (1, 2)
    places = all(len(numbers) == dims for numbers in (stride, padding, dilation))
    if not (
        shapes
        and places
        and x.shape[1] == weight.shape[1] * groups
        and x.dtype in _FLOATS
        and weight.dtype == torch.int8
        and x_scale.numel() == x_zero.numel() == 1
        and (bias is None or bias.shape == scale.shape)
        and min(groups, *stride, *dilation) > 0
        and min(padding) >= 0
        and len(weight) % groups == 0
    ):
        raise ConfigError(
            f"conv_int8: got x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} "
            f"{tuple(weight.shape)}, scale {tuple(scale.shape)}, stride {tuple(stride)}, padding "
            f"{tuple(padding)}, dilation {tuple(dilation)}, groups {groups}; allowed are floats "
            "(B, C, …), int8 (O, C / groups, …), (O,), a number a dim from 1, of padding from 0, "
            "and groups that divide O"
        )
    if min(_sizes(x.shape, weight.shape, stride, padding, dilation)) < 1:
        raise ConfigError(
            f"conv_int8: got x of size {tuple(x.shape[2:])} with padding {tuple(padding)}, which "
            f"is smaller than the kernel of {tuple(weight.shape[2:])} with dilation "
            f"{tuple(dilation)}"
        )
    lists = (list(stride), list(padding), list(dilation))
    return torch.ops.lezero.conv_int8(
        x, weight, scale, bias, x_scale, x_zero, *lists, groups, channels_last
    )


def reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    x_zero: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    channels_last: bool = False,
) -> Tensor:
    """The formula, in fp32; in fp64 where so many inputs meet that sums in fp32 would stray."""
    few = weight[0].numel() <= _MOST_INPUTS or x.device.type == "mps"  # which has no fp64
    kind = torch.float32 if few else torch.float64
    a, bad_B = image_codes(x, x_scale, x_zero)
    a = a.to(kind) - x_zero.reshape(()).float()
    convolve = F.conv1d if x.dim() == 3 else F.conv2d
    out = convolve(a, weight.to(kind), None, stride, padding, dilation, groups)
    ones = [1] * (x.dim() - 2)
    out = out * (x_scale.reshape(()).float() * scale).view(-1, *ones)
    out = out if bias is None else out + bias.float().view(-1, *ones)
    return _marked(out.to(x.dtype), bad_B, _layout(x, channels_last))


def _layout(x: Tensor, channels_last: bool) -> torch.memory_format:
    """Of y. oneDNN's lies channels last, but models that were built for torch's convolution go on
    with `.view`."""
    last = lies_channels_last(x) or (channels_last and x.dim() == 4)
    return torch.channels_last if last else torch.contiguous_format


def lies_channels_last(x: Tensor) -> bool:
    """Whether the channels of images, or of a weight for them, lie side by side. Those of one
    channel or pixel lie both ways, and count as contiguous."""
    return x.dim() == 4 and x.stride(1) == 1 and not x.is_contiguous()


def _marked(out: Tensor, bad_B: Tensor, layout: torch.memory_format) -> Tensor:
    out = out.masked_fill(bad_B.view(-1, *[1] * (out.dim() - 1)), torch.nan) if bad_B.any() else out
    return out.contiguous(memory_format=layout)


def _prepacked(weight: Tensor, lists: tuple[list[int], ...], groups: int) -> Tensor:
    version = -1 if weight.is_inference() else weight._version
    key = (version, *map(tuple, lists), groups)
    found = _packed.get(weight)
    if found is None or found[0] != key:
        ones = torch.ones(len(weight), dtype=torch.float32, device="cpu")
        made = torch.ops.onednn.qconv_prepack(weight, ones, 1.0, 0, *lists, groups, None)
        found = _packed[weight] = (key, made)
    kept: Tensor = found[1]
    return kept


@functools.cache
def _exact() -> bool:
    asked = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    held_back = asked in ("SSE41", "AVX", "AVX2", "AVX512_CORE")
    return not held_back and bool({"avx512_vnni", "avx_vnni"} & set(instruction_sets()))


def _suits(x: Tensor, weight: Tensor, groups: int) -> bool:
    """See [Note: what it gets wrong]."""
    there = torch.backends.mkldnn.is_available() and _exact()
    right = weight.shape[1] > 1 or len(weight) == groups > 1
    fits = weight[0].numel() <= _MOST_INPUTS
    return x.device.type == "cpu" and x.numel() > 0 and right and fits and there


def _conv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    x_zero: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    channels_last: bool = False,
) -> Tensor:
    lists = (stride, padding, dilation)
    if not _suits(x, weight, groups):
        return reference(x, weight, scale, bias, x_scale, x_zero, *lists, groups, channels_last)
    a, bad_B = image_codes(x, x_scale, x_zero)
    kernel = weight.shape[2:]
    if any(padding) and (max(dilation) > 1 or any(map(operator.ge, padding, kernel))):
        a = F.pad(a, [n for pad in reversed(padding) for n in (pad, pad)], value=int(x_zero))
        lists = (stride, [0] * len(padding), dilation)
    packed = _prepacked(weight, lists, groups)
    out = torch.ops.onednn.qconv_pointwise(
        a,
        float(x_scale),
        int(x_zero),
        packed,
        scale,
        torch.zeros(len(weight), dtype=torch.int64, device="cpu"),
        None if bias is None else bias.float(),
        *lists,
        groups,
        1.0,
        0,
        torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32,
        "none",
        [],
        "",
    )
    return _marked(out.to(x.dtype), bad_B, _layout(x, channels_last))


def _sizes(
    x: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The output's; below 1 where the input is smaller than the kernel."""
    return [
        (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, wide in zip(
            x[2:], weight[2:], stride, padding, dilation, strict=True
        )
    ]


def _fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    x_zero: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    channels_last: bool = False,
) -> Tensor:
    sizes = _sizes(x.shape, weight.shape, stride, padding, dilation)
    out = x.new_empty((x.shape[0], weight.shape[0], *sizes))
    return out.contiguous(memory_format=_layout(x, channels_last))


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, weight, scale, bias, _, _, *ctx.places, _ = inputs
    ctx.shape, ctx.bias = x.shape, None if bias is None else bias.dtype
    ctx.save_for_backward(weight, scale)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, scale = ctx.saved_tensors
    into = conv1d_input if weight.dim() == 3 else conv2d_input
    found = into(ctx.shape, _wide(weight, scale, grad.dtype), grad, *ctx.places)
    bias = None if ctx.bias is None else grad.float().transpose(0, 1).flatten(1).sum(1).to(ctx.bias)
    return (found, None, None, bias, *[None] * 7)


def _float_layer(x: Tensor, bias: Tensor | None, inputs: tuple[Any, ...]) -> Tensor:
    _, weight, scale, _, _, _, *places, _ = inputs
    convolve = F.conv1d if x.dim() == 3 else F.conv2d
    return convolve(x, _wide(weight, scale, x.dtype), bias, *places)


def _wide(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.float() * scale.view(-1, *[1] * (weight.dim() - 1))).to(dtype)


_library.impl("conv_int8", _conv, "CompositeExplicitAutograd")
torch.library.register_fake("lezero::conv_int8", _fake, lib=_library)
differentiate(
    *(_library, "conv_int8"),
    save=_save,
    backward=_differentiate,
    float_layer=_float_layer,
    bias_at=3,
)
