"""Copies that a kernel makes for itself.

oneDNN computes a convolution in a layout of its own: it copies what comes in and what goes out,
each as large as an image of a layer, and drops the copies with the call or before. How many there
are, and in which order they come and go beside what is returned, differs with the processor and the
shape. So a small part of the batch is run while the allocator records the blocks that it gives out:
every one, whatever the process holds and whatever runs beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lezero.memory import recorded
from lezero.plan.arguments import argument_sets
from lezero.plan.calls import Call, TensorFact, tensors
from lezero.plan.work import Most, small_enough

Course = tuple[tuple[int, int], ...]
"""(block, bytes) in the order in which they are taken; bytes -1 when one is given back. Blocks from
0 on are the call's own; -1, -2, … what it returns, in order, which stays."""

_NAMES = tuple(
    f"aten.{name}{which}."
    for name in ("convolution", "native_batch_norm")
    for which in ("", "_backward")
)
_TRIED = Most(16 << 20, 1e9)
_MOST_PRODUCTS = 2e10


def holds_more(name: str) -> bool:
    """Whether an operation of this name takes tensors for itself, as large as its arguments."""
    return name.startswith(_NAMES)


def parts(call: Call) -> tuple[Call, Call] | None:
    """A call on two parts of its batch that can be tried (the same twice where it is as small, or
    another too large): copies of images grow with it, those of the weight do not. None where even
    one sample is too large."""
    batch = call.args[0].shape[0]
    few = _part(call, batch)
    for a, b in ((few, few + 2), (1, 2), (1, 1)):  # torch computes one large image as it does more
        more = _with_batch(call, min(b, batch))
        if small_enough(more) and (b == 1 or _products(more) <= _MOST_PRODUCTS):
            return _with_batch(call, min(a, batch)), more
    return None


def course_of(call: Call) -> Course | None:
    """What it takes and gives back besides its arguments, when it is run."""
    with torch.no_grad():
        (args, kwargs), *_ = argument_sets(call)
        return course(lambda: call.op(*args, **kwargs))


def course_at(batch: int, few: Call, more: Call, found: tuple[Course, Course]) -> Course:
    """The course with a whole batch, from what was `found` for two parts of it."""
    (first, second), (a, b) = found, (call.args[0].shape[0] for call in (few, more))
    alike = [block for block, _ in first] == [block for block, _ in second]

    def at(one: int, two: int) -> int:
        if min(one, two) < 0 or b == batch:
            return two
        if alike and a < b:
            return two + max(0, two - one) * (batch - b) // (b - a)
        return two * batch // b

    before = first if alike else second
    return tuple(
        (block, at(one, two)) for (_, one), (block, two) in zip(before, second, strict=True)
    )


def course(run: Callable[[], Any]) -> Course | None:
    """What `run` takes of tensors' memory and gives back; None where that cannot be told."""
    result, blocks = recorded(run)
    if blocks is None:
        return None
    returned = [tensor.untyped_storage().data_ptr() for tensor in tensors(result)]
    events: list[tuple[int, int]] = []
    alive: dict[int, int] = {}
    for address, size in blocks:
        if size > 0:
            alive[address] = len(events)
            events.append((alive[address], size))
        elif size < 0 and address in alive:
            events.append((alive.pop(address), -1))
    stay = {alive[a]: -1 - place for place, a in enumerate(returned) if a in alive}
    left = {*alive.values()} - {*stay}
    return tuple((stay.get(block, block), size) for block, size in events if block not in left)


def sound(course: Course) -> bool:
    """Whether every block is taken once, of a size that can be, and given back at most once."""
    taken: set[int] = set()
    alive: set[int] = set()
    for block, size in course:
        if size == -1:
            if block not in alive or block < 0:
                return False
            alive.discard(block)
        elif block in taken or not 0 <= size < 1 << 48:
            return False
        else:
            taken.add(block)
            alive.add(block)
    return not any(block >= 0 for block in alive)


def _part(call: Call, batch: int) -> int:
    """Samples to try. torch computes one alone in another way, and fewer than 16 where the last
    two sides of the kernel are 1."""
    one = _with_batch(call, 1)
    moved = sum(fact.bytes for fact in _of_batch(one))
    least = 16 if math.prod(_weight(call)[2:][-2:]) == 1 else 2
    return min(batch, max(least, int(min(_TRIED.bytes / moved, _TRIED.flops / _products(one)))))


def _products(call: Call) -> float:
    """About how many floating-point operations it takes."""
    most = max(math.prod(fact.shape) for fact in _of_batch(call))
    return 2.0 * most * math.prod(_weight(call)[1:])


def _of_batch(call: Call) -> list[TensorFact]:
    """What it takes and returns of each sample."""
    batch = call.args[0].shape[0]
    return [*call.args[: _images(call)], *(f for f in call.outputs if f.shape[:1] == (batch,))]


def _weight(call: Call) -> tuple[int, ...]:
    """Its shape; () where there is none."""
    weight = call.args[_images(call)]
    return weight.shape if isinstance(weight, TensorFact) else ()


def _with_batch(call: Call, batch: int) -> Call:
    """The call on the first `batch` samples."""
    images = _images(call)

    def cut(fact: TensorFact) -> TensorFact:
        return replace(fact, shape=(batch, *fact.shape[1:]))

    few = (*map(cut, call.args[:images]), *call.args[images:])
    whole = call.args[0].shape[0]
    outputs = [cut(fact) if fact.shape[:1] == (whole,) else fact for fact in call.outputs]
    return replace(call, args=few, outputs=tuple(outputs))


def _images(call: Call) -> int:
    """How many images it takes before the weight: the input, or the gradient and the input."""
    return 2 if "_backward" in str(call.op) else 1
