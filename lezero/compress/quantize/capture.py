"""Watches layers while calibration data goes through them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.autocast import Autocast
from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.observers import observers
from lezero.compress.quantize.scheme import Recipe, Target
from lezero.compress.quantize.sites import Site, User

_once = itertools.count(1)


class Capture:
    """The `Inputs` of each layer by name, and the order in which modules were called.

    make: the record for a layer seen for the first time.
    """

    def __init__(self, users: Iterable[User], make: Callable[[User], Inputs]) -> None:
        self._users, self._make = list(users), make
        self.inputs: dict[str, Inputs] = {}
        self.calls: list[nn.Module] = []
        self._called: set[int] = set()
        self._seen: list[tuple[Tensor, int, Inputs]] = []

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
            self._seen.clear()

    def _hook(self, user: User) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            if not x.numel():
                return  # an expert that gets no token: nothing came through the layer
            known = self.inputs.get(user.name)
            image = user.kind == "conv"
            version, autocast = _version(x), Autocast.now(x.device)
            same = (r for seen, at, r in self._seen if seen is x and at == version)
            alike = (r for r in same if r.image == image and r.autocast == autocast)
            shared = next(alike, None)
            if known is None:
                known = shared if shared is not None else self._make(user)
                if known is shared:
                    known.layers.append(user.name)
                known.autocast = autocast
                self.inputs[user.name] = known
            if known is shared:
                return
            unbatched = image and x.dim() < len(user.module.get_parameter("weight").shape)
            known.add(x[None] if unbatched else x)
            self._seen.append((x, version, known))

        return before

    def _order(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._called:
            self._called.add(id(module))
            self.calls.append(module)


def _version(x: Tensor) -> int:
    """How often `x` was written to: one that was changed between two layers is another input. Where
    torch does not count (inference mode), a number that comes only once."""
    return -next(_once) if x.is_inference() else x._version


def record_for(
    targets: dict[str, tuple[Site, Target]], recipe: Recipe, hessian: bool
) -> Callable[[User], Inputs]:
    """What `Capture` makes a record with: a Hessian and an observer where a layer of this kind
    needs one, since any other of them may be given the same tensor and share the record."""
    static = {site.kind for site, target in targets.values() if target.activations == "tensor"}

    def make(user: User) -> Inputs:
        return Inputs(
            user.name,
            image=user.kind == "conv",
            hessian=hessian and user.kind == "linear",
            observer=observers.get(recipe.observer)() if user.kind in static else None,
        )

    return make
