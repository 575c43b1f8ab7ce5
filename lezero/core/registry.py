"""Members of extension points, found by name: built in or through entry points.

An extension point is a small abstract base in a file of its own. `Registry("doctor check", Check)`
holds its members; `@checks.register("torch")` adds one, and any installed distribution adds more
with an entry point in the group `lezero.plugins` whose name is `<kind>.<member>`, for example
`doctor-check.site-policy = my_package.checks:SitePolicy`. Plug-ins are imported on first use only.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from lezero.core.errors import ConfigError, LeZeroError

GROUP = "lezero.plugins"
Member = TypeVar("Member")


class Registry(Generic[Member]):
    """Named members of one extension point. `kind` is what a user would call such a member."""

    def __init__(self, kind: str, base: type | None = None) -> None:
        self.kind, self.base = kind, base
        self._members: dict[str, Member] = {}
        self._plugins: dict[str, EntryPoint] | None = None

    def register(self, name: str) -> Callable[[Member], Member]:
        """Decorator that adds a member under `name`; a name taken already is an error."""

        def add(member: Member) -> Member:
            if name in self._members:
                raise LeZeroError(f"{self.kind} '{name}' is registered twice")
            self._check(name, member)
            self._members[name] = member
            return member

        return add

    def get(self, name: str) -> Member:
        """The member called `name`; `ConfigError` names the nearest one when there is none."""
        if name not in self._members:
            if name not in self._found():
                near = difflib.get_close_matches(name, self.names(), n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(self.names())}"
                raise ConfigError(f"there is no {self.kind} '{name}'; {hint}")
            point = self._found()[name]
            try:
                member = point.load()
            except Exception as error:
                raise LeZeroError(
                    f"the plug-in {self.kind} '{name}' ({point.value}) cannot be loaded: {error}"
                ) from error
            self._check(name, member)
            self._members[name] = member
        return self._members[name]

    def names(self) -> list[str]:
        return sorted({*self._members, *self._found()})

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _found(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            prefix = self.kind.replace(" ", "-") + "."
            self._plugins = {
                point.name.removeprefix(prefix): point
                for point in entry_points(group=GROUP)
                if point.name.startswith(prefix)
            }
        return self._plugins

    def _check(self, name: str, member: object) -> None:
        if self.base is None or isinstance(member, self.base):
            return
        if isinstance(member, type) and issubclass(member, self.base):
            return
        raise LeZeroError(f"{self.kind} '{name}' is no {self.base.__name__}: {member!r}")
