"""The block codecs in plain PyTorch: the formulas that every kernel is held to, byte for byte.

For each block of elements x (fp32; the error, if there is one, already added):

    int8, int4  levels L = 127 or 7; scale s = |x|max / L rounded up to bf16; q = round(x / s),
                halves to even, computed as x · (1/s); decoded q · s, which is exact in fp32
    sign        s = mean |x| in bf16, summed as 16 sums of every 16th element and then halves onto
                halves; decoded +s or -s by the sign bit
    2:4         of each four the two largest in magnitude, of equal ones the first; those as bf16
                (to nearest), or as int8 or int4 with the block's scale; the others decode to 0

[Note: values that are not finite]
A block that holds one has the scale NaN and decodes to NaN (2:4: its kept elements do), never to
something finite; its error stays what it was. So does that of a value within 1% of the largest
number that is rounded to an infinity, or whose loss is where errors are kept in bf16. A scale so
small that 1/s overflows (|x|max below about 1.5e-36 for int8, 8e-38 for int4) becomes 0: the block
decodes to zeros, its error to x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.ops.codec.layout import Layout
from lezero.ops.quantize import pack_nibbles, unpack_nibbles

_NAN_BF16 = 0x7FC0
_LEVELS = {"int8": 127.0, "int4": 7.0, "2:4-int8": 127.0, "2:4-int4": 7.0}


def encode(values: Tensor, payload: Tensor, error: Tensor | None, form: str, block: int) -> None:
    """Writes `payload`, and what was lost into `error` (which was added to the values first)."""
    layout = Layout(form, values.numel(), block)
    if not layout.numel:
        return
    x_KB = _in_blocks(values.float() if error is None else values.float() + error.float(), block)
    scale_K = _scales(x_KB, layout)
    good_K1 = (torch.isfinite(x_KB).all(1) & torch.isfinite(_wide(scale_K)))[:, None]
    filler = float("nan") if form == "2:4-bf16" else 0.0
    sent_KB = torch.where(good_K1, x_KB, filler)
    step_K1 = torch.where(good_K1, _wide(scale_K)[:, None], 0.0)
    parts = [_bytes(scale_K)[: layout.scales]]
    if layout.sparse:
        keep_KB = _two_of_four(sent_KB)
        parts.append(_pack_bits(keep_KB)[: layout.kept])
        data, back = _quantize(sent_KB[keep_KB].view(len(sent_KB), -1), step_K1, form)
        decoded_KB = torch.zeros_like(sent_KB).masked_scatter_(keep_KB, back)
    else:
        data, decoded_KB = _quantize(sent_KB, step_K1, form)
    payload.copy_(torch.cat([*parts, data[: layout.data]]))
    if error is not None:
        lost = (x_KB - decoded_KB).flatten()[: layout.numel]
        whole = good_K1.expand_as(x_KB).flatten()[: layout.numel]
        whole = whole & lost.to(error.dtype).isfinite()
        error.copy_(torch.where(whole, lost, error.float()))


def decode(payload: Tensor, out: Tensor, form: str, block: int, add: bool) -> None:
    """out = what the payload says, or out += it, in fp32 and rounded once to `out`'s dtype."""
    layout = Layout(form, out.numel(), block)
    if not layout.numel:
        return
    scale_K, kept, data = payload.split([layout.scales, layout.kept, layout.data])
    K = layout.blocks
    step_K1 = torch.ones(K, 1, dtype=torch.float32, device=out.device)
    if layout.scales:
        step_K1 = _wide(_view(scale_K, torch.int16))[:, None].to(out.device)
    if layout.sparse:
        keep_KB = _unpack_bits(_padded(kept, K * block // 8)).view(K, block)
        pairs = _dequantize(data, step_K1, form, K, block // 2)
        # Past the end of the payload there may be groups that keep nothing.
        places = torch.zeros(K, block, dtype=torch.float32, device=out.device)
        decoded_KB = places.masked_scatter_(keep_KB, pairs.flatten()[: int(keep_KB.sum())])
    else:
        decoded_KB = _dequantize(data, step_K1, form, K, block)
    decoded = decoded_KB.flatten()[: layout.numel]
    out.copy_(out.float() + decoded if add else decoded)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


def _scales(x_KB: Tensor, layout: Layout) -> Tensor:
    """The bits of each block's bf16 scale, as int16; NaN for a block that has none."""
    if layout.form == "2:4-bf16":
        return torch.zeros(len(x_KB), dtype=torch.int16, device=x_KB.device)
    if layout.form == "sign":
        lanes = x_KB.abs().view(len(x_KB), -1, 16).unbind(1)
        total = torch.zeros_like(lanes[0])
        for lane in lanes:
            total = total + lane
        while total.shape[1] > 1:
            total = total[:, : total.shape[1] // 2] + total[:, total.shape[1] // 2 :]
        counts = x_KB.new_full((len(x_KB), 1), float(layout.block))
        counts[-1] -= layout.blocks * layout.block - layout.numel
        bits = (total / counts).bfloat16()[:, 0].view(torch.int16)
    else:
        exact = x_KB.abs().amax(1) / _LEVELS[layout.form]
        bits = ((exact.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16)
        bits = torch.where(bits < 0x0080, 0, bits)
    good = torch.isfinite(x_KB).all(1) & torch.isfinite(_wide(bits))
    return torch.where(good, bits, _NAN_BF16).to(torch.int16)


def _wide(bits: Tensor) -> Tensor:
    return bits.view(torch.bfloat16).float()


def _quantize(x_KB: Tensor, step_K1: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """The data bytes of whole blocks, and what they decode to."""
    if form == "sign":
        negative = x_KB.view(torch.int32) < 0
        return _pack_bits(negative), torch.where(negative, -step_K1, step_K1)
    if form == "2:4-bf16":
        bits = torch.where(x_KB.isnan(), _NAN_BF16, x_KB.bfloat16().view(torch.int16))
        return _bytes(bits.to(torch.int16)), _wide(bits.to(torch.int16))
    q = torch.round(x_KB * torch.where(step_K1 > 0, 1 / step_K1, 0.0))
    if form.endswith("int8"):
        return q.to(torch.int8).view(torch.uint8).flatten(), q * step_K1
    return pack_nibbles((q + 8).to(torch.uint8).flatten()), q * step_K1


def _dequantize(data: Tensor, step_K1: Tensor, form: str, K: int, B: int) -> Tensor:
    if form == "sign":
        negative = _unpack_bits(_padded(data, K * B // 8)).view(K, B)
        return torch.where(negative, -step_K1, step_K1)
    if form == "2:4-bf16":
        return _view(_padded(data, 2 * K * B), torch.bfloat16).float().view(K, B)
    if form.endswith("int8"):
        return _padded(data, K * B).view(torch.int8).float().view(K, B) * step_K1
    q = unpack_nibbles(_padded(data, K * B // 2), K * B).float() - 8
    return q.view(K, B) * step_K1


def _two_of_four(x_KB: Tensor) -> Tensor:
    size = x_KB.view(torch.int32).bitwise_and(0x7FFFFFFF).view(-1, 4)
    order = torch.sort(size, dim=1, descending=True, stable=True).indices[:, :2]
    kept = torch.zeros_like(size, dtype=torch.bool).scatter_(1, order, True)
    return kept.view(x_KB.shape)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).flatten()


def _view(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as `dtype`, wherever they begin."""
    return data.clone().view(dtype)


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, size - data.numel()))


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _pack_bits(x: Tensor) -> Tensor:
    return (x.reshape(-1, 8) * _powers(x.device)).sum(1).to(torch.uint8)


def _unpack_bits(data: Tensor) -> Tensor:
    return (data[:, None] & _powers(data.device)).bool().flatten()
