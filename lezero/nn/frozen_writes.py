"""Which frozen parameters a forward pass writes: a teacher's moving average, a codebook.

[Note: how they are found]
Copying all frozen parameters beforehand would double the memory of a model with adapters. So the
pass runs once while each operation is looked at just before it runs: one that is about to write
into the memory of a frozen parameter has that copied first. Another tensor in a parameter's place
(`p.data = …`) leaves the memory as it was, which is held meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Named = tuple[nn.Module, str]
"""A module, and the name in it of a parameter or buffer of its own."""


def frozen_writes(model: nn.Module, run: Callable[[], object]) -> list[Named]:
    """The parameters without a gradient that `run` writes; they are as before afterwards.

    Does not call `run` where nothing is frozen. Those on meta and shards are not looked at.
    """
    frozen = list(_frozen(model))
    if not frozen:
        return []
    watch = _CopyBeforeWrite(frozen)
    try:
        with watch:
            run()
    finally:
        written = [each for each in frozen if each.put_back(watch.copies)]
    return [(each.module, each.name) for each in written]


@dataclass(frozen=True)
class _Frozen:
    """A parameter as it was; `memory` is what it showed then."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    memory: Tensor

    @property
    def place(self) -> int:
        return self.memory.untyped_storage().data_ptr()

    @torch.no_grad()
    def put_back(self, copies: dict[int, torch.UntypedStorage]) -> bool:
        """Whether there was something to put back."""
        now = self.module._parameters.get(self.name)
        moved = now is not self.parameter or now.data_ptr() != self.memory.data_ptr()
        if moved:
            self.module._parameters[self.name] = self.parameter
            self.parameter.data = self.memory
        if self.place in copies:
            self.memory.untyped_storage().copy_(copies[self.place])
        return moved or self.place in copies


def _frozen(model: nn.Module) -> Iterator[_Frozen]:
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            data = parameter.data
            if type(data) is Tensor and data.layout is torch.strided and not data.is_meta:
                yield _Frozen(module, name, parameter, data)


class _CopyBeforeWrite(TorchDispatchMode):
    """Copies the memory of a frozen parameter, by its place, before the first write into it."""

    def __init__(self, frozen: list[_Frozen]) -> None:
        super().__init__()
        self._memory = {each.place: each.memory for each in frozen if each.memory.numel()}
        self.copies: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for at, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[at] if at < len(args) else kwargs.get(argument.name)
                    for leaf in pytree.tree_leaves(given):
                        self._before_write(leaf)
        return func(*args, **kwargs)

    def _before_write(self, target: Any) -> None:
        if not isinstance(target, Tensor) or target.layout is not torch.strided:
            return
        place = target.untyped_storage().data_ptr()
        if place in self._memory and place not in self.copies:
            self.copies[place] = self._memory[place].untyped_storage().clone()
