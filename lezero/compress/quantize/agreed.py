"""Ranks of a process group that quantize one model: all begin alike, and go by the same figures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from lezero.compress.quantize.request import Request
from lezero.compress.quantize.tensors import raw
from lezero.core import groups
from lezero.core.errors import ConfigError, NumericsError

_CHUNK = 1 << 24
Figure = TypeVar("Figure", bound=float | None)


def agreed(measure: Callable[[], Figure]) -> Figure:
    """What rank 0 measures, on every rank; where any fails all do, so that all undo what they did.
    Every rank measures, since a metric may communicate."""
    figure: Figure = _told(measure)[0]
    return figure


def begun_alike(ask: Callable[[], Request], *, alone: bool) -> Request:
    """What every rank asks for itself, once it is seen that all ask for the same, of the same model
    with the same data; where any cannot ask, all fail. alone: nothing is measured, so that nothing
    has to be told, and one rank may quantize by itself."""
    if groups.world_size() == 1 or alone:
        return ask()
    made: list[Request] = []

    def asked() -> dict[str, str]:
        made.append(ask())
        return _marks(made[0])

    told = _told(asked)
    for rank, theirs in enumerate(told):
        for what, mark in told[0].items():
            if theirs[what] != mark:
                raise ConfigError(
                    f"{what}: rank {rank} gives another {what} than rank 0; in a process group "
                    f"every rank quantizes the same model with the same data (this is rank "
                    f"{groups.rank()}): give the same {what} on each"
                )
    return made[0]


def _told(find: Callable[[], Any]) -> list[Any]:
    """What each rank finds; where one fails all do."""
    failure: Exception | None = None
    found: Any = None
    problem = ""
    try:
        found = find()
    except Exception as error:
        failure, problem = error, str(error) or type(error).__name__
    every = groups.gather_objects((found, problem))
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(every):
        if problem:
            raise NumericsError(f"rank {rank}: {problem}")
    return [value for value, _ in every]


def _marks(request: Request) -> dict[str, str]:
    """Digests of what all ranks must have in common."""
    asked = (request.scheme, sorted(request.targets), request.objective, request.budget)
    marks = {what: hashlib.sha256() for what in ("config", "model", "data")}
    marks["config"].update(repr((*asked, request.metric is None)).encode())
    for name, value in (*request.model.named_parameters(), *request.model.named_buffers()):
        marks["model"].update(name.encode())
        _add(marks["model"], value)
    for batch in request.batches or ():
        marks["data"].update(b"batch")
        for leaf in pytree.tree_leaves(batch):
            _add(marks["data"], leaf)
    return {what: mark.hexdigest() for what, mark in marks.items()}


def _add(digest: Any, value: Any) -> None:
    """What a tensor or a plain value is, to a digest."""
    if not isinstance(value, Tensor):
        plain = isinstance(value, bool | int | float | complex | str | None)
        digest.update(repr(value if plain else type(value).__name__).encode())
        return
    digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
    for part in () if value.is_meta else raw(value):
        for chunk in part.split(_CHUNK):
            digest.update(chunk.cpu().numpy())
