"""What encoding lost on the wires of a sharded model, into a checkpoint and back.

Each rank has errors of its own (see `comm/feedback.py`); they are stored as
`feedback/<axis>/<rank>/<key>`. The same ranks on the same axes over the same topology each go on
with their own; what servers owe, and over the hierarchical topology what the ranks of a host owe,
each of them is given whole, since other buffers may make others its owners. When a model whose
ranks were on one axis goes on with another number of ranks on one axis, or over another topology,
every rank reads the errors of all, and their pending mean is kept exactly. One rank alone has no
wire: what was pending is dropped then, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lezero.checkpoint import Loaded
from lezero.comm.feedback import SERVER, WORKER
from lezero.comm.link import Link
from lezero.core import groups
from lezero.core.log import logger
from lezero.train.gradients import wires

log = logger("train")
_PREFIX = "feedback"


def pack(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """This rank's errors by name, and the lines (see `_lines`) that keep them."""
    found: dict[str, torch.Tensor] = {}
    links = _links(model)
    for axis, link in links.items():
        assert link.feedback is not None
        for key, error in link.feedback.state_dict().items():
            found[f"{_PREFIX}/{axis}/{groups.rank()}/{key}"] = error
    return found, _lines(links)


def prefixes(model: nn.Module, documents: Mapping[str, Any]) -> tuple[str, ...]:
    """The names under which lies what this rank needs."""
    saved: dict[str, list[int]] = documents.get("feedback", {})
    links = _links(model)
    now = _lines(links)
    if saved == now:
        own = [f"{_PREFIX}/{axis}/{groups.rank()}/" for axis in now]
        return tuple(own) + tuple(_of_others(links))
    return (f"{_PREFIX}/",) if len(saved) == len(now) == 1 else ()


def restore(model: nn.Module, loaded: Loaded) -> None:
    """Gives the wires the errors that are pending in a checkpoint; what they held is dropped."""
    saved: dict[str, list[int]] = loaded.documents.get("feedback", {})
    links = _links(model)
    now = _lines(links)
    if saved and saved != now and not len(saved) == len(now) == 1:
        log.warning(
            "what encoding lost before the checkpoint is dropped: it was kept on the axes %s, and "
            "now it is kept on %s (ranks, ranks whose sum is encoded)", saved, now or "none",
        )  # fmt: skip
    for axis, link in links.items():
        assert link.feedback is not None
        states: list[dict[str, torch.Tensor]] = [{}]
        if saved == now:
            states = [_of(loaded, axis, rank) for rank in link.ranks]
        elif len(saved) == len(now) == 1:
            before, (size, _) = next(iter(saved.items()))
            states = [_of(loaded, before, rank) for rank in range(size)]
        link.feedback.load_state_dict(states)


def _of_others(links: Mapping[str, Link]) -> Iterator[str]:
    """Where what a rank may come to own lies beside its own errors."""
    for axis, link in links.items():
        assert link.feedback is not None
        share = link.feedback.share
        host = link.rank // share
        for place, rank in enumerate(link.ranks):
            yield f"{_PREFIX}/{axis}/{rank}/{SERVER}:1:{link.size}/"
            if share > 1 and place // share == host:
                yield f"{_PREFIX}/{axis}/{rank}/{WORKER}:{share}:{link.size}/"


def _of(loaded: Loaded, axis: str, rank: int) -> dict[str, torch.Tensor]:
    return loaded.section(f"{_PREFIX}/{axis}/{rank}")


def _links(model: nn.Module) -> dict[str, Link]:
    """The wires that keep errors, by their axis."""
    return {axis: link for axis, link in wires(model).items() if link.feedback is not None}


def _lines(links: Mapping[str, Link]) -> dict[str, list[int]]:
    """By axis, how many ranks it has and of how many ranks' sum each keeps errors."""
    found = {}
    for axis, link in links.items():
        assert link.feedback is not None
        found[axis] = [link.size, link.feedback.share]
    return found
