"""How much work an operation is, and a smaller one of the same kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lezero.plan.calls import Call, TensorFact

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
_LSTM = ("aten.mkldnn_rnn_layer.", "aten.mkldnn_rnn_layer_backward.")
_ATTENTION = ("aten._scaled_dot_product", "lezero.attention.", "lezero.attention_backward.")


class Most(NamedTuple):
    """The most that a call that is tried may move and compute."""

    bytes: int
    flops: float


HOST = Most(192 << 20, 8e9)
ACCELERATOR = Most(2 << 30, 2e12)
"""Small work would not show how fast it is."""
_LONG = 2048
"""Above it attention of half the length runs at the same rate."""


def roughly(call: Call) -> float:
    """Seconds of a call on a modest machine: what to measure first, and a last resort."""
    return (flops(call) + attention_flops(call)) / 1e11 + work_bytes(call) / 1e10


def work_bytes(call: Call) -> int:
    """Bytes that a call moves: its tensors and what it returns, or writes into its arguments."""
    written = sum(fact.bytes for fact in call.outputs)
    if not call.outputs:
        arguments = [*call.args, *call.kwargs.values()]
        written = max((sum(f.bytes for f in tensor_facts(a)) for a in arguments), default=0)
    return input_bytes(call) + written


def input_bytes(call: Call) -> int:
    return sum(fact.bytes for fact in tensor_facts([call.args, list(call.kwargs.values())]))


def flops(call: Call) -> float:
    """Floating-point operations of a matrix product, 2·M·N·K, or of an LSTM's; else 0."""
    if call.key.startswith(_LSTM):
        steps, samples, width = call.args[0].shape
        count = 2.0 * steps * samples * call.args[1].shape[0] * (width + call.args[2].shape[1])
        return 2 * count if _backward(call) else count
    if not call.key.startswith(_PRODUCTS):
        return 0.0
    first, second = list(tensor_facts(call.args))[-2:]
    count = 2.0 * second.shape[-1]
    for size in first.shape:
        count *= size
    return count


def attention_flops(call: Call) -> float:
    """Floating-point operations of fused attention: two products forward, five backward."""
    if not call.key.startswith(_ATTENTION):
        return 0.0
    q = _queries(call)
    k = list(tensor_facts(call.args))[2 if _backward(call) else 1]
    count = (5.0 if _backward(call) else 2.0) * 2 * k.shape[-2]
    for extent in q.shape:
        count *= extent
    return count / 2 if _causal(call) else count


def _causal(call: Call) -> bool:
    names = [argument.name for argument in call.op._schema.arguments]
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return given.get("is_causal", given.get("causal")) is True  # ours has the shorter name


def _backward(call: Call) -> bool:
    return "backward" in call.key.split("(", 1)[0]


def _queries(call: Call) -> TensorFact:
    """(B, heads, T, width) of fused attention, whose backward takes a gradient before it."""
    return list(tensor_facts(call.args))[1 if _backward(call) else 0]


def small_enough(call: Call, most: Most = HOST) -> bool:
    """Whether the call may be run at all: what could not be made smaller is estimated instead."""
    return _room(call) <= 2 * most.bytes


def _room(call: Call) -> int:
    """Bytes that trying the call may take: kernels widen bytes and flags to int64 inside."""
    everything = tensor_facts([call.args, list(call.kwargs.values()), call.outputs])
    return work_bytes(call) + sum(8 * fact.bytes for fact in everything if fact.dtype.itemsize == 1)


def shrink(call: Call, most: Most = HOST) -> tuple[Call, float]:
    """A call small enough to try, and what its seconds must be multiplied with."""
    scale = 1.0
    if call.key.startswith(_PRODUCTS):
        while flops(call) > most.flops or work_bytes(call) > most.bytes:
            before = flops(call)
            call = _cut(call, _longest(call))
            scale *= before / flops(call)
        return call, scale
    while call.key.startswith(_LSTM) and call.args[0].shape[0] > 1:
        if flops(call) <= most.flops and _room(call) <= most.bytes:
            break
        before = flops(call)
        call = _shorter(call)
        scale *= before / flops(call)
    while attention_flops(call) > most.flops:
        before = attention_flops(call)
        batch, *_, length, _ = _queries(call).shape
        # Square in length, linear in samples; samples and heads are what threads share.
        call = _cut(call, length if length > _LONG or batch == 1 else batch)
        scale *= before / attention_flops(call)
    while (before := _room(call)) > most.bytes:
        lists = [a for a in call.args if _is_list(a)]
        length = len(lists[0]) // 2 if lists else 0
        if length and not call.outputs:
            call = _fewer(call, length)
        elif (size := _leading(call)) > 1:
            call = _cut(call, size)
        else:
            break
        if _room(call) >= before:
            break
        scale *= before / _room(call)
    return call, scale


def _shorter(call: Call) -> Call:
    """Half the time steps of an LSTM: they come first in its sequences, and in its workspace."""

    def cut(value: Any) -> Any:
        if isinstance(value, TensorFact) and (len(value.shape) == 3 or value.dtype == torch.uint8):
            return replace(value, shape=(value.shape[0] // 2, *value.shape[1:]))
        return value

    return replace(call, args=tuple(map(cut, call.args)), outputs=tuple(map(cut, call.outputs)))


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], TensorFact)


def _fewer(call: Call, length: int) -> Call:
    """The first tensors of every list: an optimizer's operation over fewer parameters."""

    def first(value: Any) -> Any:
        return value[:length] if isinstance(value, tuple) else value

    args = tuple(first(a) for a in call.args)
    return replace(call, args=args, kwargs={k: first(v) for k, v in call.kwargs.items()})


def _longest(call: Call) -> int:
    return max(size for fact in tensor_facts(call.args) for size in fact.shape)


def _leading(call: Call) -> int:
    """The first dim above 1 of the largest tensor: samples, or rows."""
    everything = [call.args, list(call.kwargs.values()), call.outputs]
    largest = max(tensor_facts(everything), key=lambda fact: fact.bytes)
    return next((size for size in largest.shape if size > 1), 1)


def _cut(call: Call, size: int) -> Call:
    """Halves every dim of length `size`, wherever it stands."""

    def cut(value: Any) -> Any:
        if isinstance(value, TensorFact):
            shape = tuple(s // 2 if s == size else s for s in value.shape)
            order = sorted(range(len(shape)), key=lambda d: (value.stride[d], -d))
            strides, step = [0] * len(shape), 1
            for d in order:
                if value.stride[d]:
                    strides[d] = step
                    step *= shape[d]
            return replace(value, shape=shape, stride=tuple(strides))
        if isinstance(value, tuple):
            return tuple(cut(item) for item in value)
        return size // 2 if value == size and type(value) is int else value

    kwargs = {k: cut(v) for k, v in call.kwargs.items()}
    return replace(call, args=cut(call.args), kwargs=kwargs, outputs=cut(call.outputs))


def tensor_facts(value: Any) -> Iterator[TensorFact]:
    if isinstance(value, TensorFact):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensor_facts(item)
