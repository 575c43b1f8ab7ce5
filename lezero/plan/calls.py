"""Operations by what they are given: tensors as shapes, strides and types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class TensorFact:
    """Shape, stride and dtype of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes that reading every element once moves (an expanded dim is read once)."""
        count = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride else 1
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One distinct operation: tensors in `args` and `kwargs` are `TensorFact`s.

    outputs: what it returns; empty for operations that only write into their arguments.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(hash=False)
    key: str
    outputs: tuple[TensorFact, ...] = field(default=(), hash=False)


def real(value: Any) -> bool:
    """Whether it is a tensor with values."""
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def plain(value: Any) -> Any:
    """The same with a `TensorFact` for each tensor."""
    if isinstance(value, torch.Tensor):
        return TensorFact(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    return value


def text(value: Any) -> str:
    """Of a plain value, for keys."""
    if isinstance(value, TensorFact):
        return f"{value.shape}{value.stride}{str(value.dtype)[6:]}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(text, value))})"
    return str(value)
