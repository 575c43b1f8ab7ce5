"""Tensors of any layout as what they hold in memory, and those that a model keeps beside its
parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lezero.core.tensors import flat_bytes

_TABLES = ("_parameters", "_buffers", "_modules")


def is_dense(x: Tensor) -> bool:
    """Whether it has strides, and its values lie where these say."""
    return x.layout == torch.strided


def place(x: Any) -> tuple[int, int] | None:
    """The number of the memory that a dense tensor is of, and where in it it begins; of anything
    else `None`."""
    if not isinstance(x, Tensor) or not is_dense(x):
        return None
    return x.untyped_storage()._cdata, int(x.storage_offset())


def overlaps(x: Tensor) -> bool:
    """Whether a dense tensor may have values that share a place in memory, as `expand` makes them:
    nothing can be written to one alone."""
    end = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += stride * (size - 1)
    return False


def span(x: Tensor) -> tuple[int, int, int] | None:
    """The number of the memory that a dense tensor is of, and the bytes of it from its first value
    to its last; `None` where it has none, or is not dense."""
    where = place(x)
    if where is None or not x.numel():
        return None
    number, begin = where
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    width = x.element_size()
    return number, begin * width, (begin + last + 1) * width


def sharing_memory(tensors: Iterable[Tensor]) -> set[int]:
    """Ids of the tensors that another one may have values in common with: views of each other, and
    those that were given each other's `.data`."""
    found = set[int]()
    spans = sorted(
        (*where, key) for key, x in {id(x): x for x in tensors}.items() if (where := span(x))
    )
    before, reaches, by = None, 0, 0
    for number, begin, end, key in spans:
        if number == before and begin < reaches:
            found |= {by, key}
        if number != before or end > reaches:
            before, reaches, by = number, end, key
    return found


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Its strides (`channels_last`, a transposed weight); of a view with gaps, without them."""
    return torch.empty_like(x, device="meta").stride()


def arranged(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The values with these strides; a copy where theirs are others."""
    if values.stride() == stride:
        return values
    made = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
    return made.copy_(values)


def kept_beside(model: nn.Module) -> Iterator[Tensor]:
    """Tensors in the attributes of a model's modules, and in lists, tuples, sets and dicts there,
    also in each other. Of a module that only such a list holds: its parameters and buffers too."""
    registered = list(model.modules())
    seen = {id(module) for module in registered}
    waiting = [x for m in registered for name, x in vars(m).items() if name not in _TABLES]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        if not isinstance(value, list | tuple | set | frozenset | dict | nn.Module):
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            waiting += vars(value).values()
        else:
            waiting += value.values() if isinstance(value, dict) else value


def dense_parts(x: Tensor) -> list[Tensor]:
    """The dense tensors that it is made of: itself, or the indices and values of a sparse one;
    conjugates and negatives as values."""
    x = x.detach()
    if is_dense(x):
        return [x.resolve_conj().resolve_neg()]
    if x.layout == torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x.to_dense()]


def nbytes(x: Tensor) -> int:
    """What it holds, in bytes."""
    return sum(part.nbytes for part in dense_parts(x))


def raw(x: Tensor) -> list[Tensor]:
    """The bytes of its parts, flat."""
    return [flat_bytes(part.contiguous()) for part in dense_parts(x)]


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether they hold the same, NaN or not."""
    alike = (one.shape, one.dtype, one.layout) == (two.shape, two.dtype, two.layout)
    return alike and all(torch.equal(*pair) for pair in zip(raw(one), raw(two), strict=True))
