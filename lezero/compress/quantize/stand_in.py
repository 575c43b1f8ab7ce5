"""What lets foreign code read a quantized weight, a module, as the tensor that it stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lezero.compress.quantize.autocast import cast

_ONLY_READ = (
    "'{}' of a quantized weight: it is only read; .decode() gives a tensor of its own, and "
    "lz.dequantize_(model) plain layers"
)
# What is told without decoding.
_OF_SHAPE = ("dim", "ndim", "ndimension", "nelement", "numel", "size")
_TWO_SIDED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS = [
    *_TWO_SIDED,
    *(f"r{name}" for name in _TWO_SIDED),
    *("lt", "le", "gt", "ge"),
    *("getitem", "iter", "contains", "neg", "pos", "abs"),
]
# How NumPy and `torch.as_tensor` ask for the values.
_EXCHANGES = ["__array__", "__dlpack__", "__dlpack_device__"]
# Those of `nn.Module` would convert the weight itself.
_TYPES = ["to", "type", "float", "double", "half", "bfloat16"]
_DEVICES = ["cpu", "cuda", "ipu", "mtia", "xpu"]


class StandIn(nn.Module, ABC):
    """Torch's functions, a tensor's methods and its operators work on the decoded weight.

    `F.linear` multiplies with the codes. What would write to the weight is an `AttributeError`.
    `.to()`, `.float()`, `.cpu()` and the like give a tensor, as a parameter's do; those of the
    model reach the weight by `_apply`.
    """

    requires_grad = False
    grad = None
    transposed = False  # `linear` multiplies with its transpose

    # `==` of two modules is their identity: torch looks them up in lists and dicts, where an answer
    # for each element would be no answer.
    def __eq__(self, other: object) -> Any:
        return self is other if isinstance(other, nn.Module) else self.decode() == _plain(other)

    def __ne__(self, other: object) -> Any:
        return self is not other if isinstance(other, nn.Module) else self.decode() != _plain(other)

    __hash__ = nn.Module.__hash__

    def __len__(self) -> int:
        return self.shape[0]

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def decode(self, dtype: torch.dtype | None = None) -> Tensor: ...

    @abstractmethod
    def linear(
        self, x: Tensor, bias: Tensor | None, x_bits: int, x_scale: Tensor | None, x_block: int = 0
    ) -> Tensor: ...

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not hasattr(Tensor, name):
                raise
        if name == "data" or name.endswith("_"):
            raise AttributeError(_ONLY_READ.format(name))
        if name in _OF_SHAPE:
            return getattr(torch.empty(self.shape, device="meta"), name)
        return getattr(self.decode(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            raise AttributeError(_ONLY_READ.format(name))
        super().__setattr__(name, value)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:  # first, as torch.compile cannot follow the check
            x, weight, bias = _linear(*args, **kwargs)
            kernel = isinstance(weight, StandIn) and not weight.transposed
            if kernel and not isinstance(x, StandIn):
                return weight.linear(cast(x, weight), _decode(bias), 16, None)
        _check_reads(function, args, kwargs)
        plain = {name: _plain(value) for name, value in kwargs.items()}
        return function(*map(_plain, args), **plain)


def _linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """The arguments of `F.linear`, by place or by name."""
    return input, weight, bias


def _check_reads(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`AttributeError` where a function would write to a weight: in place (`fill_`, `normal_` of
    `torch.nn.init`, `_foreach_mul_`: to the first argument), or into `out`."""
    name = getattr(function, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    first = args[0] if args else [kwargs.get(key) for key in ("input", "self", "tensor")]
    written = [kwargs.get("out"), first if in_place else None]
    leaves = pytree.tree_leaves(pytree.tree_map(_opened, written))
    if any(isinstance(leaf, StandIn) for leaf in leaves):
        raise AttributeError(_ONLY_READ.format(name))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return pytree.tree_map(_decode, pytree.tree_map(_opened, value))
    return _decode(value)


def _decode(leaf: Any) -> Any:
    return leaf.decode() if isinstance(leaf, StandIn) else leaf


def _opened(leaf: Any) -> Any:
    """A list or tuple of a class that pytree does not know, as one that it goes through."""
    if not isinstance(leaf, list | tuple):
        return leaf
    same: Any = list(leaf) if isinstance(leaf, list) else tuple(leaf)
    return pytree.tree_map(_opened, same)


def _decoded(name: str) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.decode(), name)(*map(_plain, args), **kwargs)

    return method


for _name in [*(f"__{name}__" for name in _OPERATORS), *_EXCHANGES, *_TYPES, *_DEVICES]:
    setattr(StandIn, _name, _decoded(_name))
