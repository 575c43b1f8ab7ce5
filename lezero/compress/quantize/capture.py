"""Watches layers while calibration data goes through them.

[Note: shared inputs]
Layers that are given one tensor (query, key and value) share a record of it, which holds one
Hessian for all of them, from the first call on. Where one of them is given something else later
(self-attention in one batch, cross-attention in the next), what they have added up cannot be told
apart: they are named in `parted`, and whoever watches begins anew. Those that were given the same
throughout share a record then too. A layer that is not called while others of its record are (an
adapter that is off) has been given nothing else, and stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.autocast import Autocast
from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.observers import observers
from lezero.compress.quantize.scheme import Recipe, Target
from lezero.compress.quantize.sites import Site, User

_once = itertools.count(1)


@dataclass
class _Given:
    """A tensor that a record took in, and the layers that were given it."""

    x: Tensor
    version: int
    record: Inputs
    layers: set[str]


Layers = frozenset[str]
"""Their names."""


class Capture:
    """The `Inputs` of each layer by name, and the order in which modules were called.

    make: the record for a layer seen for the first time. apart: sets of layers whose records are
    theirs alone. parted: those of layers that shared one and were given different inputs, so that
    it is mixed. See [Note: shared inputs].
    """

    def __init__(
        self, users: Iterable[User], make: Callable[[User], Inputs], apart: Iterable[Layers] = ()
    ) -> None:
        self._users, self._make, self.apart = list(users), make, frozenset(apart)
        self.inputs: dict[str, Inputs] = {}
        self.calls: list[nn.Module] = []
        self.parted: set[Layers] = set()
        self._called: set[int] = set()
        self._seen: list[_Given] = []
        self._times: dict[int, int] = {}  # that something was added to a record

    @contextmanager
    def watching(self, part: nn.Module) -> Iterator[None]:
        """Takes in what goes through `part` (which holds the layers) once."""
        hooks = [
            user.module.register_forward_pre_hook(self._hook(user), with_kwargs=True)
            for user in self._users
        ]
        own = {user.module for user in self._users}  # which may hold an adapter
        hooks += [
            module.register_forward_hook(self._order)
            for module in part.modules()
            if not self.calls
            and (module in own or next(module.children(), None) is None)
            and not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._part()
            self._seen.clear()

    def _hook(self, user: User) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            if not x.numel():
                return  # an expert that gets no token: nothing came through the layer
            known = self.inputs.get(user.name)
            image = user.kind == "conv"
            version, autocast = _version(x), Autocast.now(x.device)
            same = [one for one in self._seen if one.x is x and one.version == version]
            same = [o for o in same if (o.record.image, o.record.autocast) == (image, autocast)]
            if known is None:
                joined = next((one for one in same if self._joins(user.name, one)), None)
                known = self._make(user) if joined is None else joined.record
                if joined is not None:
                    known.layers.append(user.name)
                known.autocast = autocast
                self.inputs[user.name] = known
            shared = next((one for one in same if one.record is known), None)
            if shared is not None:
                shared.layers.add(user.name)
                return
            unbatched = image and x.dim() < len(user.module.get_parameter("weight").shape)
            known.add(x[None] if unbatched else x)
            self._times[id(known)] = self._times.get(id(known), 0) + 1
            self._seen.append(_Given(x, version, known, {user.name}))

        return before

    def _joins(self, name: str, given: _Given) -> bool:
        """Whether a layer may share a record: one that holds nothing but what it is given too."""
        both = {name, *given.record.layers}
        mixed = any(both & some and not both <= some for some in self.apart)
        return not mixed and self._times[id(given.record)] == 1

    def _part(self) -> None:
        """Notes the layers of each record by the tensors that each was given, where they differ."""
        every = {id(one.record): one.record for one in self._seen}
        for record in every.values():
            given = [one.layers for one in self._seen if one.record is record]
            alike: dict[tuple[bool, ...], set[str]] = {}
            for name in record.layers:
                got = tuple(name in layers for layers in given)
                if any(got):
                    alike.setdefault(got, set()).add(name)
            if len(alike) > 1:
                self.parted |= {frozenset(names) for names in alike.values()}

    def _order(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._called:
            self._called.add(id(module))
            self.calls.append(module)


def _version(x: Tensor) -> int:
    """How often `x` was written to: one that was changed between two layers is another input. Where
    torch does not count (inference mode), a number that comes only once."""
    return -next(_once) if x.is_inference() else x._version


def record_for(
    targets: dict[str, tuple[Site, Target]], recipe: Recipe, hessian: Callable[[Site], bool]
) -> Callable[[User], Inputs]:
    """What `Capture` makes a record with: a Hessian where `hessian` of the layer's weight says so,
    and an observer where a layer of this kind needs one, since any other of them may be given the
    same tensor and share the record."""
    static = {site.kind for site, target in targets.values() if target.activations == "tensor"}

    def make(user: User) -> Inputs:
        return Inputs(
            user.name,
            image=user.kind == "conv",
            hessian=user.kind == "linear" and hessian(targets[user.name][0]),
            observer=observers.get(recipe.observer)() if user.kind in static else None,
        )

    return make
