"""Optimizers inside of an optimizer, as wrappers keep them, and what such classes keep besides.

A wrapper (two optimizers in one, Lookahead) holds others in its attributes, each with state of its
own, which `optimizer.state` of the wrapper does not show. They are known by where they are: `a` for
`self.a`, `parts.0` for `self.parts[0]`, `of.layer.weight` for what `self.of` has under that
parameter; their tensors are `optimizer/.inner/<where>/…`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch.optim import Optimizer

from lezero.checkpoint.shared_state import pack_shared, warn_of
from lezero.core.errors import FileError
from lezero.core.groups import is_main
from lezero.core.log import logger

_INNER = ".inner/"
_log = logger("checkpoint")


def inner_optimizers(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], *, of_closed: bool = False
) -> dict[str, Optimizer]:
    """Those inside, at any depth, that hold some of `parameters` and keep anything themselves; of a
    class that refuses to show its state none, unless `of_closed`."""
    found: dict[str, Optimizer] = {}
    walk = _Walk(parameters, of_closed=of_closed)
    for where, inner in walk.inside(optimizer):
        if walk.holds(inner) and not any(_same(inner, x) for x in (optimizer, *found.values())):
            found[where] = inner
    return found


def inner_to_load(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], document: Mapping[str, Any]
) -> dict[str, Optimizer]:
    """Those inside whose state the document has, where it has no other place's than theirs."""
    seen, records = inner_optimizers(optimizer, parameters), document.get("inner")
    kind = type(optimizer).__name__
    if records is None:
        if seen:
            _warn(
                f"the checkpoint was written without the state of the optimizers inside of {kind} "
                f"({', '.join(seen)}), which begin anew"
            )
        return {}
    if not isinstance(records, dict) or seen.keys() - records.keys():
        raise FileError(
            f"the checkpoint holds optimizers inside of {document.get('class')} at "
            f"{_listed(records)}, this {kind} has them at {_listed(seen)}; build the one it was "
            "saved with, or begin in another folder"
        )
    # A class may show its state only after a step, or make what is inside in the first one.
    there = inner_optimizers(optimizer, parameters, of_closed=True)
    missing = [where for where in records if where not in there]
    if missing:
        _warn(
            f"the checkpoint holds the state of optimizers inside of {kind} that are not there "
            f"({', '.join(missing)}) and begin anew if they are made later; make them with the "
            "optimizer, and they go on"
        )
    return {where: there[where] for where in records if where in there}


def _listed(inner: object) -> str:
    return ", ".join(inner) if isinstance(inner, dict) and inner else "no place"


def _warn(text: str) -> None:
    if is_main():
        _log.warning(text)


def inner_prefix(prefix: str, where: str) -> str:
    """What the names of tensors of the inner optimizer at `where` begin with."""
    return f"{prefix}{_INNER}{where}/"


def is_inner(name: str, prefix: str) -> bool:
    """Whether a tensor belongs to an inner optimizer."""
    return name.startswith(prefix + _INNER)


def outer_name(name: str, prefix: str = "optimizer/") -> str:
    """The name that a tensor would have if its optimizer were inside of none."""
    if not is_inner(name, prefix):
        return name
    return prefix + name.removeprefix(prefix + _INNER).partition("/")[2]


def warn_of_left_out(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Warns once of state that a save will leave out: the shared one that cannot be saved, and what
    `warn_of_more` finds. A class that does not show its state may do so after the first step, so
    that the save tells it."""
    inner = inner_optimizers(optimizer, parameters)
    for each in inner.values():
        pack_shared(each)
    pack_shared(optimizer)
    warn_of_more(optimizer, inner, parameters, shown=False)


def warn_of_more(
    optimizer: Optimizer,
    inner: Mapping[str, Optimizer],
    parameters: Mapping[str, Tensor],
    *,
    shown: bool = True,
) -> None:
    """Warns once of what an optimizer keeps besides its groups and states and those of `inner`,
    which alone are saved: what `state_dict()` of a class that has one of its own has, and
    optimizers at places that have no name. shown: also where a class does not show its state."""
    every = [optimizer, *inner.values()]
    tensors, keys = {_mark(p) for p in parameters.values()}, {"state", "param_groups", "params"}
    _collect([[each.state, each.param_groups] for each in every], tensors, keys, set())
    left: dict[str, str] = {}
    walk = _Walk(parameters, everywhere=True)
    for where, each in walk.inside(optimizer):
        if walk.holds(each) and not any(_same(each, other) for other in every):
            left[f"optimizer {where}"] = (
                f"{type(each).__name__} at {where} inside of {type(optimizer).__name__} holds "
                "parameters of the model; keep it in an attribute, a list, or a dictionary by "
                "text, number or parameter"
            )
    for each in every:
        if type(each).state_dict is Optimizer.state_dict:
            continue
        kind = type(each).__name__
        try:
            saved = each.state_dict()
        except Exception as error:  # whatever a class of the user's raises
            if shown:
                left[f"state_dict of {kind}"] = f"{kind}.state_dict() could not be read ({error})"
            continue
        for where in _unknown(saved, "", False, tensors, keys, set()):
            left[f"state_dict of {kind}{where}"] = (
                f"{kind}.state_dict(){where} is neither in its groups nor in its state or in that "
                f"of an optimizer in its attributes; keep it in state[parameter], in "
                "state['a text'] or as an option of a group"
            )
    warn_of(optimizer, left)


def tell_rates(
    where: str,
    inner: Optimizer,
    optimizer: Optimizer,
    groups: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> None:
    """Warns where a load gives another rate to `groups` (each with its saved options) that are the
    inner optimizer's alone: nobody else looks at them."""
    outer = {id(group) for group in optimizer.param_groups}
    for group, options in groups:
        given, saved = group.get("lr"), options.get("lr")
        if id(group) in outer or given is None or saved is None or float(given) == float(saved):
            continue
        if is_main():
            _log.warning(
                "the %s inside of the optimizer (%s) is given lr=%g and goes on with lr=%g, as it "
                "was saved", type(inner).__name__, where, float(given), float(saved),
            )  # fmt: skip


def _is_closed(optimizer: Optimizer) -> bool:
    """Whether its class refuses to show its state, as one that keeps a part on each rank does. One
    that stumbles over what is not there before the first step does not refuse."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return False
    try:
        optimizer.state_dict()
    except (AttributeError, LookupError, TypeError):
        return False
    except Exception:  # whatever a class of the user's raises
        return True
    return False


def _same(inner: Optimizer, other: Optimizer) -> bool:
    """Whether `inner` keeps nothing that `other` does not: some wrappers take over both."""
    groups = {id(group) for group in other.param_groups}
    return inner.state is other.state and all(id(g) in groups for g in inner.param_groups)


class _Walk:
    """Through attributes, lists and dictionaries by text, number or parameter: what has a name in
    every process. everywhere: under other keys, too, and in dataclasses."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        of_closed: bool = False,
        everywhere: bool = False,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._of_closed, self._everywhere = of_closed, everywhere
        self._seen = set[int]()

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether it holds any of the parameters."""
        return any(
            id(p) in self._names for group in optimizer.param_groups for p in group["params"]
        )

    def inside(self, optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
        """The optimizers inside of it, with where they are."""
        self._seen.add(id(optimizer))
        if self._of_closed or not _is_closed(optimizer):
            yield from self._within(vars(optimizer), "")

    def _within(self, value: Any, where: str) -> Iterator[tuple[str, Optimizer]]:
        is_record = self._everywhere and is_dataclass(value) and hasattr(value, "__dict__")
        is_record = is_record and not isinstance(value, type)
        if not is_record and not isinstance(value, Optimizer | Mapping | list | tuple):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Optimizer):
            yield where, value
            if self._of_closed or not _is_closed(value):
                yield from self._within(vars(value), where)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from self._within(item, _joined(where, number))
        else:
            for key, item in (vars(value) if is_record else value).items():
                name = self._names.get(id(key), key)
                if isinstance(name, str | int):
                    yield from self._within(item, _joined(where, name))
                elif self._everywhere:
                    yield from self._within(item, _joined(where, type(name).__name__))


def _joined(where: str, key: str | int) -> str:
    name = quote(str(key), safe="")  # no slash, which ends it in the names of tensors
    return f"{where}.{name}" if where else name


def _collect(value: Any, tensors: set[int], keys: set[str], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        tensors.add(_mark(value))
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Mapping):
            keys.update(key for key in value if isinstance(key, str))
        for item in value.values() if isinstance(value, Mapping) else value:
            _collect(item, tensors, keys, seen)


def _unknown(
    value: Any, where: str, known: bool, tensors: set[int], keys: set[str], seen: set[int]
) -> Iterator[str]:
    """Where `value` has tensors that are no optimizer's, or values under no key of one."""
    if isinstance(value, Tensor):
        if value.numel() and _mark(value) not in tensors:
            yield where
    elif isinstance(value, Mapping | list | tuple):
        if id(value) in seen:
            return
        seen.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            inside = key in keys or (known and not isinstance(key, str))
            yield from _unknown(item, f"{where}[{key!r}]", inside, tensors, keys, seen)
    elif value is not None and not isinstance(value, str) and not known:
        yield where


def _mark(tensor: Tensor) -> int:
    """What tells a tensor from others, and is the same for another view of all of it."""
    plain = tensor.layout is torch.strided and not hasattr(tensor, "placements")
    return (tensor.data_ptr() if plain else 0) or id(tensor)
