"""Numbers that a model's constructor reads from tensors of constants, on fake tensors.

A fake tensor has no numbers, yet many constructors read some: the rates of stochastic depth are
`torch.linspace(0, rate, depth).tolist()` in whole families of vision models. What such a factory
makes, and what plain arithmetic and views make of it, is computed for real beside the fake tensor,
until anything is written to it, or may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

_FACTORIES = (torch.linspace, torch.logspace, torch.arange, torch.tensor, torch.as_tensor)
_LARGEST = 4096
_FACTS = (int, float, str, tuple, torch.dtype, torch.device, torch.layout)
_READS = {
    "tolist", "item", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__",
}  # fmt: skip
_PURE = {
    *("split", "chunk", "unbind", "__iter__", "__getitem__", "flip", "view", "reshape", "clone"),
    *("add", "sub", "rsub", "mul", "div", "pow", "neg", "exp", "log", "sqrt", "square", "round"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__div__", "__rdiv__", "__pow__", "__rpow__", "__neg__"),
    *("cumsum", "sum", "min", "max", "mean", "float", "double", "int", "long", "to", "tensor"),
    *("gt", "ge", "lt", "le", "eq", "__gt__", "__ge__", "__lt__", "__le__"),
}


class Constants(TorchFunctionMode):
    """While it is on, small tensors of constants are known by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        """Of a fake tensor, by its id: itself, the real one, and its version then."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, name = _tensors((args, kwargs)), getattr(func, "__name__", "")
        met = any(id(x) in self._known for x in given)
        made = not given and func in _FACTORIES
        pure = made or (name in _PURE and "out" not in kwargs)
        if not (pure or name in _READS) or not all(map(self._is_known, given)):
            result = func(*args, **kwargs)
            told = isinstance(result, _FACTS) and not _tensors(result)  # of a shape, say
            if met and not pure and not told:
                self._known.clear()  # it may write to what it is given, or give it another name
            return result
        try:
            result = func(*args, **kwargs)
        except Exception:
            read = self._real(func, args, kwargs) if given and name in _READS else None
            if read is None:
                raise
            return read
        passing = isinstance(result, Iterator)
        result = list(result) if passing else result
        if pure:
            self._learn(_tensors(result), func, args, kwargs)
        return iter(result) if passing else result

    def _is_known(self, x: torch.Tensor) -> bool:
        found = self._known.get(id(x))
        return found is not None and found[2] == x._version

    def _learn(self, made: list[torch.Tensor], func: Any, args: Any, kwargs: Any) -> None:
        if not made or any(x.numel() > _LARGEST for x in made):
            return
        real = _tensors(self._real(func, args, kwargs))
        if len(real) == len(made):
            found = zip(made, real, strict=True)
            self._known |= {id(x): (x, y, x._version) for x, y in found}

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the function gives for the numbers; None where it gives nothing."""

        def number(x: Any) -> Any:
            return self._known[id(x)][1] if isinstance(x, torch.Tensor) else x

        if func in _FACTORIES:
            kwargs = {**kwargs, "device": "cpu"}
        try:
            with _disable_current_modes(), torch.no_grad():
                found = func(*tree_map(number, args), **tree_map(number, kwargs))
                return list(found) if isinstance(found, Iterator) else found
        except Exception:  # the same call on fake tensors says what is wrong with it
            return None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, torch.Tensor)]
