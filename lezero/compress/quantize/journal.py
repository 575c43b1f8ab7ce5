"""What was changed in a model, so that all of it can be undone: all or nothing.

Before a module changes, `remember` notes what it is made of. `release` moves a parameter's values
to the disk, so that the quantized weight can take their place in memory. `undo` gives every module
its class, its parameters (the same objects, with the same values and strides), buffers and
attributes back. Released values come back in memory of their own, but for those whose memory others
in the model have too (a flat buffer, a view): they wait where they are, and are one again. What
another process shares is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.spill import Spill
from lezero.compress.quantize.tensors import arranged, strides_of

_CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Journal:
    """Undoes what was remembered. The values of released parameters wait in `spill`; those of
    `shared`, ids, in their memory, which nothing of ours writes to."""

    def __init__(self, spill: Spill, shared: Collection[int] = ()) -> None:
        self._spill, self._shared = spill, shared
        self._kept: dict[int, Tensor] = {}
        self._modules: dict[int, tuple[nn.Module, type[nn.Module], dict[str, Any]]] = {}
        self._released: dict[int, nn.Parameter] = {}
        self._strides: dict[int, tuple[int, ...]] = {}

    def remember(self, module: nn.Module) -> None:
        """Call it before the class, parameters or attributes of `module` change."""
        if id(module) in self._modules:
            return
        own = dict(module.__dict__)
        for name in _CONTAINERS:
            own[name] = own[name].copy()
        self._modules[id(module)] = (module, type(module), own)

    def save_values(self, parameter: nn.Parameter) -> None:
        """Call it before values of `parameter` are written to."""
        if id(parameter) not in self._released:
            if id(parameter) in self._shared:
                self._kept[id(parameter)] = parameter.data
            else:
                self._spill.put(("original", id(parameter)), parameter.data)
            self._strides[id(parameter)] = strides_of(parameter)
            self._released[id(parameter)] = parameter  # now that there is something to give back

    def release(self, parameter: nn.Parameter) -> None:
        """Frees the memory of `parameter`, which no module uses any more."""
        self.save_values(parameter)
        with mode_of(parameter):
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def take_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Saved parameters, none of them released, have their values from before again."""
        for parameter in parameters:
            self._give_back(id(parameter))
            del self._released[id(parameter)]
            if self._kept.pop(id(parameter), None) is None:
                self._spill.drop(("original", id(parameter)))

    def restore(self, module: nn.Module) -> None:
        """Gives one remembered module back; its parameters get their values from before."""
        _, kind, own = self._modules.pop(id(module))
        for parameter in own["_parameters"].values():
            key = id(parameter)
            if key in self._released:
                self._give_back(key)
        module.__class__ = kind
        module.__dict__.clear()
        module.__dict__.update(own)

    def undo(self) -> None:
        """Everything is as it was."""
        for module, _, _ in list(self._modules.values()):
            self.restore(module)
        for key in list(self._released):
            self._give_back(key)
        self._released.clear()

    def wrote(self, parameter: nn.Parameter) -> bool:
        """Whether its values are others than before, or gone, since somebody saved them first."""
        return id(parameter) in self._released

    def _give_back(self, key: int) -> None:
        parameter = self._released[key]
        with mode_of(parameter):
            if key in self._kept:
                parameter.data = self._kept[key]
                return
            values = self._spill.get(("original", key))
            if parameter.data.shape != values.shape:
                parameter.data = arranged(values, self._strides[key])
            else:
                parameter.data.copy_(values)


def mode_of(tensor: Tensor) -> AbstractContextManager[object]:
    """In it new values for `tensor` are made and written. One of `torch.inference_mode` takes
    no others: with values of the outside no op would read it any more."""
    return torch.inference_mode(tensor.is_inference())
