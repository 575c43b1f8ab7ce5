"""The ops `lezero::linear_bf16`, `linear_int` and `embedding_int`. See `reference.py`.

Letters: M tokens (all leading dims), N output features, K input features, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.linear import accelerator, native, reference
from lezero.ops.linear.checks import check_bias, check_devices, check_packed, check_weight
from lezero.ops.linear.derivatives import bias_grad, differentiate
from lezero.ops.linear.direct import unseen
from lezero.ops.linear.layout import PANEL, Packed, in_rows, padded_inputs, unpack_bf16

_library = torch.library.Library("lezero", "FRAGMENT")
_library.define("linear_bf16(Tensor x, Tensor weight, Tensor? bias, SymInt out_features) -> Tensor")
_library.define(
    "linear_int(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias, "
    "Tensor? x_scale, SymInt out_features, int bits, int group, int x_bits, int x_block=0, "
    "bool may_round=False) -> Tensor"
)
_library.define(
    "embedding_int(Tensor ids, Tensor weight, Tensor scale, Tensor? zero, SymInt in_features, "
    "int bits, int group, ScalarType dtype, SymInt rows) -> Tensor"
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What activations may be."""
MOST_INPUTS = 1 << 16
"""K may be up to this, so that sums of whole numbers fit 32 bits."""


def linear_bf16(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_features: int
) -> Tensor:
    """x wᵀ + bias for a weight of `pack_bf16`, summed in fp32: (…, K) → (…, N) in x's dtype.

    Raises `ConfigError` for shapes, dtypes and devices that do not fit. Differentiable in x and
    bias. Of K only ⌈K / 32⌉ is known here: other widths pass as in `linear_int`, with 0 for
    padding.
    """
    check_devices("linear_bf16", x=x, weight=weight, bias=bias)
    check_weight("linear_bf16", weight, torch.bfloat16, 2, out_features)
    _check_x("linear_bf16", x, weight.shape[1] * 2, 32)
    check_bias("linear_bf16", bias, out_features)
    return torch.ops.lezero.linear_bf16(x, weight, bias, out_features)


def linear_int(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    out_features: int,
    bits: int,
    group: int = 0,
    x_bits: int = 16,
    x_block: int = 0,
    x_scale: Tensor | None = None,
    may_round: bool = False,
) -> Tensor:
    """x wᵀ + bias for a weight of `pack` or `to_rows`: (…, K) → (…, N) in x's dtype.

    `bits`: of the weight, 4 or 8. `group`: inputs that share a scale, a multiple of 32, or 0 for a
    scale a row. `x_bits`: 16 (weight-only: W8A16, W4A16) takes each block of a token's inputs in
    fixed point, to 1.6e-5 of the block's largest (`ops/quantize/tokens.py`); 8 rounds each token to
    int8 (W8A8, W4A8), with its own scale or with `x_scale` (one element) for all; with `x_block`
    as many of its inputs share a scale: 32, 64 or 128, which divides the group. `may_round`:
    many tokens in bf16 may be multiplied as they are, with the weight as `linear_rounded` takes it,
    where this is faster: with AMX; how many are enough depends on the form. Raises
    `ConfigError` for shapes, dtypes and devices that do not fit. Differentiable in x and bias, as
    if x had not been rounded.

    K itself is not known here: any x passes of whose width `pack` makes a weight of this shape
    (the same ⌈K / 64⌉; in rows the same `rows.width`) with as many groups. A narrower x than K is
    multiplied with the weight's first inputs; the last inputs of a wider one with the padding,
    which holds whatever. So callers compare x with K, as `PackedWeight` of `lezero.compress` does.
    """
    sizes = (out_features, bits, group, x_bits, x_block)
    floats = bias is None or bias.is_floating_point()
    if floats and unseen(x, bias) and _on_kernel(x):
        given = (x.contiguous(), *packed, _wide(bias), _wide(x_scale), *sizes, False, may_round)
        try:
            found: Tensor = native.NATIVE.ops.linear_int(*given)
            return found
        except RuntimeError:  # what does not fit has a name below; all else is raised once more
            pass
    _check_int(x, packed, bias, x_scale, *sizes)
    return torch.ops.lezero.linear_int(x, *packed, bias, x_scale, *sizes, may_round)


def _check_int(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_features: int,
    bits: int,
    group: int,
    x_bits: int,
    x_block: int,
) -> None:
    check_devices("linear_int", x=x, **packed._asdict(), bias=bias, x_scale=x_scale)
    check_packed("linear_int", packed, x.shape[-1] if x.dim() else 0, out_features, bits, group)
    _check_x("linear_int", x, padded_inputs(packed, bits), 512 if in_rows(packed) else 64)
    check_bias("linear_int", bias, out_features)
    given = x_scale is not None
    of_token = x_bits == 8 and not x_block
    if x_bits not in (8, 16) or (x_block and x_bits == 16) or (given and not of_token):
        raise ConfigError(
            f"linear_int: x_bits is {x_bits}, x_block {x_block}, x_scale "
            f"{'given' if given else None}; allowed are 16, or 8 with x_block or an x_scale, or "
            "neither"
        )
    if x_block and (x_block not in reference.BLOCKS or group % x_block):
        blocks = [size for size in reference.BLOCKS if group % size == 0]
        raise ConfigError(
            f"linear_int: x_block is {x_block}; allowed with group {group} are 0 and "
            f"{', '.join(map(str, blocks))}"
        )
    if x_scale is not None and x_scale.numel() != 1:
        raise ConfigError(f"linear_int: x_scale is {tuple(x_scale.shape)}; it has one element")


def linear_rounded(
    x: Tensor, packed: Packed, bias: Tensor | None, *, out_features: int, bits: int, group: int = 0
) -> Tensor:
    """x wᵀ + bias with the weight of `pack` rounded to bf16 as it is read, x and the result bf16:
    `linear_bf16` of the dequantized weight. With a scale a row and whole zero points it loses
    nothing by that: its codes are multiplied, and the sums scaled. With AMX only, where it suits
    many tokens; elsewhere a `ConfigError`. Not differentiable.
    """
    check_devices("linear_rounded", x=x, **packed._asdict(), bias=bias)
    check_packed("linear_rounded", packed, x.shape[-1] if x.dim() else 0, out_features, bits, group)
    _check_x("linear_rounded", x, padded_inputs(packed, bits), 64)
    check_bias("linear_rounded", bias, out_features)
    if not _on_kernel(x) or native.kernel_name() != "amx" or in_rows(packed):
        raise ConfigError("linear_rounded: it needs a CPU with AMX, and a weight in panels")
    if x.dtype != torch.bfloat16:
        raise ConfigError(f"linear_rounded: x is {x.dtype}; allowed is torch.bfloat16")
    given = (x.contiguous(), *packed, _wide(bias), None, out_features, bits, group, 16, 0, True)
    found: Tensor = native.NATIVE.ops.linear_int(*given)
    return found


def embedding_int(
    ids: Tensor,
    packed: Packed,
    *,
    in_features: int,
    bits: int,
    group: int = 0,
    dtype: torch.dtype = torch.float32,
    rows: int | None = None,
) -> Tensor:
    """Rows `ids` (int64 or int32, any shape) of a packed (N, K) weight: (…, K) in `dtype`.

    The layout is that of `linear_int`, so an output head may share the weight. On the CPU, an id
    that is not below `rows` (N; by default all that the weight holds, with panels' padding) raises
    `IndexError`.
    """
    if ids.dtype not in (torch.int64, torch.int32) or dtype not in FLOATS:
        raise ConfigError(
            f"embedding_int: ids are {ids.dtype}, dtype is {dtype}; allowed: int64 or int32 ids, "
            "fp32, bf16 or fp16"
        )
    check_devices("embedding_int", ids=ids, **packed._asdict())
    held = packed.weight.shape[:1].numel() * (1 if in_rows(packed) else PANEL)
    rows = held if rows is None else rows
    check_packed("embedding_int", packed, in_features, rows, bits, group)
    padded = padded_inputs(packed, bits)
    if not in_rows(packed) and not padded - 64 < in_features <= padded:
        raise ConfigError(
            f"embedding_int: {in_features} inputs in {bits} bits, where the weight is "
            f"{tuple(packed.weight.shape)}; allowed is what it was packed with"
        )
    return torch.ops.lezero.embedding_int(ids, *packed, in_features, bits, group, dtype, rows)


def _check_x(what: str, x: Tensor, padded: int, depth: int) -> None:
    K = x.shape[-1] if x.dim() else 0
    if x.dtype not in FLOATS or not max(0, padded - depth) < K <= min(padded, MOST_INPUTS):
        raise ConfigError(
            f"{what}: x is {x.dtype} {tuple(x.shape)}; allowed are fp32, bf16 and fp16 of (…, K), "
            f"K of the weight at most {padded}, and at most {MOST_INPUTS}"
        )


def _on_kernel(x: Tensor) -> bool:
    return x.device.type == "cpu" and native.NATIVE.available()


def _wide(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.float().contiguous()


def _bf16(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    x = x.contiguous()
    if _on_kernel(x):
        found: Tensor = native.NATIVE.ops.linear_bf16(x, weight, _wide(bias), out_features)
        return found
    flat = x.view(-1, x.shape[-1])
    return reference.linear_bf16(flat, weight, bias, out_features).view(*x.shape[:-1], out_features)


def _int(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_features: int,
    bits: int,
    group: int,
    x_bits: int,
    x_block: int = 0,
    may_round: bool = False,
) -> Tensor:
    x, sizes = x.contiguous(), (out_features, bits, group, x_bits, x_block)
    if _on_kernel(x) and weight.dim() == 4:
        given = (x, weight, scale, zero, _wide(bias), _wide(x_scale), *sizes, False, may_round)
        found: Tensor = native.NATIVE.ops.linear_int(*given)
        return found
    flat, packed = x.view(-1, x.shape[-1]), Packed(weight, scale, zero)
    work = (reference if x.device.type == "cpu" else accelerator).linear_int
    return work(flat, packed, bias, x_scale, *sizes).view(*x.shape[:-1], out_features)


def _embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    in_features: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    flat = ids.flatten().long()
    on_cpu = flat.device.type == "cpu"
    if flat.numel() and on_cpu:
        low, high = flat.aminmax()
        if low < 0 or high >= rows:
            raise IndexError(f"embedding_int: ids from {low} to {high}; there are {rows}")
    packed = Packed(weight, scale, zero)
    found = embedding_rows(flat, packed, in_features, bits, group, dtype)
    return found.view(*ids.shape, in_features)


def embedding_rows(
    ids: Tensor, packed: Packed, in_features: int, bits: int, group: int, dtype: torch.dtype
) -> Tensor:
    """`embedding_int` for ids (flat, int64) that are known to be rows of the weight: nothing is
    checked, which takes ten times as long as one row."""
    if _on_kernel(ids) and not in_rows(packed):
        found = torch.empty((len(ids), in_features), dtype=dtype, device="cpu")
        native.NATIVE.ops.embedding(ids.contiguous(), *packed, found, bits, group)
        return found
    work = (reference if ids.device.type == "cpu" else accelerator).embedding
    return work(ids, packed, in_features, bits, group, dtype)


def _fake_linear(x: Tensor, *rest: Any) -> Tensor:
    out_features = rest[2] if len(rest) == 3 else rest[5]
    return x.new_empty((*x.shape[:-1], out_features))


def _fake_embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    in_features: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    return ids.new_empty((*ids.shape, in_features), dtype=dtype)


def _save_bf16(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, weight, bias, ctx.out_features = inputs
    ctx.in_features, ctx.bias = x.shape[-1], None if bias is None else bias.dtype
    ctx.save_for_backward(weight)


def _differentiate_bf16(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wide = unpack_bf16(ctx.saved_tensors[0], ctx.out_features, ctx.in_features)
    return grad @ wide.to(grad.dtype), None, bias_grad(ctx, grad), None


def _float_bf16(x: Tensor, bias: Tensor | None, inputs: tuple[Any, ...]) -> Tensor:
    _, weight, _, out_features = inputs
    wide = unpack_bf16(weight, out_features, x.shape[-1])
    return torch.nn.functional.linear(x, wide.to(x.dtype), bias)


def _save_int(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, weight, scale, zero, bias, _, ctx.out_features, ctx.bits, ctx.group, *_ = inputs
    ctx.in_features, ctx.bias = x.shape[-1], None if bias is None else bias.dtype
    ctx.save_for_backward(weight, scale, zero)


def _differentiate_int(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    sizes = (ctx.out_features, ctx.in_features, ctx.bits, ctx.group)
    wide = accelerator.dequantize(Packed(*ctx.saved_tensors), *sizes, grad.dtype)
    return (grad @ wide, *[None] * 3, bias_grad(ctx, grad), *[None] * 7)


def _float_int(x: Tensor, bias: Tensor | None, inputs: tuple[Any, ...]) -> Tensor:
    _, weight, scale, zero, _, _, out_features, bits, group, *_ = inputs
    sizes = (out_features, x.shape[-1], bits, group)
    wide = accelerator.dequantize(Packed(weight, scale, zero), *sizes, x.dtype)
    return torch.nn.functional.linear(x, wide, bias)


_library.impl("linear_bf16", _bf16, "CompositeExplicitAutograd")
_library.impl("linear_int", _int, "CompositeExplicitAutograd")
_library.impl("embedding_int", _embedding, "CompositeExplicitAutograd")
torch.library.register_fake("lezero::linear_bf16", _fake_linear, lib=_library)
torch.library.register_fake("lezero::linear_int", _fake_linear, lib=_library)
torch.library.register_fake("lezero::embedding_int", _fake_embedding, lib=_library)
differentiate(
    *(_library, "linear_bf16"),
    save=_save_bf16,
    backward=_differentiate_bf16,
    float_layer=_float_bf16,
    bias_at=2,
)
differentiate(
    *(_library, "linear_int"),
    save=_save_int,
    backward=_differentiate_int,
    float_layer=_float_int,
    bias_at=4,
)
