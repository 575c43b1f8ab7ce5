"""What encoding lost on the wires of a sharded model, into a checkpoint and back.

Each rank has errors of its own (see `comm/feedback.py`); they are stored as
`feedback/<axis>/<rank>/<key>`. The same ranks on the same axes each go on with their own. When a
model whose ranks were on one axis goes on with another number of ranks on one axis, every rank
reads the errors of all, and their pending mean is kept exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lezero.checkpoint import Loaded
from lezero.comm.link import Link
from lezero.core import groups
from lezero.core.log import logger
from lezero.train.gradients import wires

log = logger("train")
_PREFIX = "feedback"


def pack(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """This rank's errors by name, and how many ranks each axis has that keeps any."""
    found: dict[str, torch.Tensor] = {}
    links = _links(model)
    for axis, link in links.items():
        assert link.feedback is not None
        for key, error in link.feedback.state_dict().items():
            found[f"{_PREFIX}/{axis}/{groups.rank()}/{key}"] = error
    return found, {axis: link.size for axis, link in links.items()}


def prefixes(model: nn.Module, documents: Mapping[str, Any]) -> tuple[str, ...]:
    """The names under which lies what this rank needs."""
    saved: dict[str, int] = documents.get("feedback", {})
    now = {axis: link.size for axis, link in _links(model).items()}
    if saved == now:
        return tuple(f"{_PREFIX}/{axis}/{groups.rank()}/" for axis in now)
    return (f"{_PREFIX}/",) if len(saved) == len(now) == 1 else ()


def restore(model: nn.Module, loaded: Loaded) -> None:
    """Gives the wires the errors that are pending in a checkpoint."""
    saved: dict[str, int] = loaded.documents.get("feedback", {})
    links = _links(model)
    now = {axis: link.size for axis, link in links.items()}
    if saved and saved != now and not len(saved) == len(now) == 1:
        log.warning(
            "what encoding lost before the checkpoint is dropped: it was kept on the axes %s, and "
            "now it is kept on %s", saved, now or "none",
        )  # fmt: skip
        return
    for axis, link in links.items():
        assert link.feedback is not None
        if saved == now:
            states: list[dict[str, torch.Tensor]] = [{} for _ in range(link.size)]
            states[link.rank] = _of(loaded, axis, groups.rank())
        else:
            before, size = next(iter(saved.items()), (axis, 0))
            states = [_of(loaded, before, rank) for rank in range(size)]
        if any(states):
            link.feedback.load_state_dict(states)


def _of(loaded: Loaded, axis: str, rank: int) -> dict[str, torch.Tensor]:
    return loaded.section(f"{_PREFIX}/{axis}/{rank}")


def _links(model: nn.Module) -> dict[str, Link]:
    """The wires that keep errors, by their axis."""
    return {axis: link for axis, link in wires(model).items() if link.feedback is not None}
