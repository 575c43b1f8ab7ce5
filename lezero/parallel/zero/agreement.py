"""Ranks that shard one model agree on everything first; each is told which key differs."""

from __future__ import annotations

from typing import Any

from lezero.core import groups
from lezero.core.errors import UnlikeError


def agree(what: str, mine: dict[str, Any]) -> None:
    """Raises the same `UnlikeError` on every rank when the ranks' `mine` differ.

    Values are plain data. The message names the first key that differs and the values of rank 0
    and of the first rank that differs from it.
    """
    every = groups.gather_objects(mine)
    for rank, theirs in enumerate(every):
        for key in dict.fromkeys([*every[0], *theirs]):
            ours, other = every[0].get(key, "nothing"), theirs.get(key, "nothing")
            if ours != other:
                raise UnlikeError(
                    f"{what}: '{key}' is {ours!r} on rank 0 but {other!r} on rank {rank}; "
                    "start every rank with the same version, model and configuration"
                )


def agree_on_errors(what: str, problem: Exception | None) -> None:
    """Raises on every rank when one has a problem: its own there, and its text elsewhere."""
    texts = groups.gather_objects(str(problem) if problem else "")
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text:
            raise UnlikeError(f"{what}: rank {rank} failed: {text}")
