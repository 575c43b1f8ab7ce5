"""How the gradients of the ranks meet in a step on fake tensors: not at all, under DDP, sharded."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from lezero.comm.choice import Exchange
from lezero.parallel.zero.norm import squares
from lezero.plan import sharded
from lezero.plan.kinds import FEEDBACK, GRADIENT, PARAMETER, WHOLE, WIRE

if TYPE_CHECKING:
    from lezero.parallel.zero import Sharding
    from lezero.plan.spec import StepSpec
    from lezero.plan.trace import Recorder


class Meeting:
    """One rank: nothing meets. `cache`: whether autocast keeps the weights that it has cast."""

    cache = True

    def begin(self, *, last: bool) -> None:
        """Before a micro-batch."""

    def end(self) -> None:
        """After a micro-batch, and after the update."""

    def gradients(self, trainable: list[nn.Parameter]) -> list[torch.Tensor]:
        """What clipping scales, its norm taken."""
        found = [p.grad for p in trainable if p.grad is not None]
        if found:
            squares(found, found[0].device)
        return found

    def finish(self, model: nn.Module) -> None:
        """Both steps are over."""


class Buckets(Meeting):
    """Gradients as views of standing buckets, as torch's data-parallel wrapper keeps them.

    In the last micro-batch of a step each gradient moves into its bucket as soon as it is whole.
    """

    def __init__(self, trainable: list[nn.Parameter], recorder: Recorder) -> None:
        self.meet = True
        for parameter in trainable:
            view = torch.empty_like(parameter, requires_grad=False)
            recorder.adopt(view, GRADIENT)

            def move(parameter: torch.Tensor, view: torch.Tensor = view) -> None:
                if self.meet:
                    parameter.grad = view

            parameter.register_post_accumulate_grad_hook(move)

    def begin(self, *, last: bool) -> None:
        self.meet = last


class Shards(Meeting):
    """A model under `lz.shard_`. It is counted from then on, as one that was built on meta.

    Stages 0 and 1 reduce in the last micro-batch, the others in each (`train/gradients.py`).
    """

    cache = False

    def __init__(self, model: nn.Module, spec: StepSpec, recorder: Recorder) -> None:
        mapped = sharded.topology(spec) == "shared"

        def count(tensor: torch.Tensor, kind: str) -> None:
            if tensor.numel():
                recorder.keep(tensor, kind, mapped=mapped and kind == WIRE)

        self.recorder, self.spec = recorder, spec
        self.sharding: Sharding = sharded.shard(model, spec, count)
        self.parameters = sum(held.rows.numel for held in self.sharding.parameters.values())
        self._traffic: list[Counter[Exchange]] = []

    def begin(self, *, last: bool) -> None:
        self.sharding.backward.sync = last or self.sharding.stage >= 2

    def end(self) -> None:
        lines = self.sharding.lines
        assert isinstance(lines, sharded.StillLines)
        self._traffic.append(lines.traffic.copy())
        lines.traffic.clear()

    def gradients(self, trainable: list[nn.Parameter]) -> list[torch.Tensor]:
        sharded.norm(self.sharding)
        return sharded.gradients(self.sharding)

    def finish(self, model: nn.Module) -> None:
        for tensor in sharded.whole_copies(self.sharding):
            self.recorder.rename(tensor, WHOLE)
        for parameter in model.parameters():
            self.recorder.rename(parameter, PARAMETER)
        lines = self.sharding.lines
        assert isinstance(lines, sharded.StillLines)
        if lines.link is not None:
            self.recorder.trace.state_bytes[FEEDBACK] = lines.link.saved_bytes
        micros = min(self.spec.accumulate, 2)
        *each, update = self._traffic[-micros - 1 :]  # of the second step
        again = self.spec.accumulate - 1 if self.sharding.stage >= 2 else 1
        for index, one in enumerate([*each, update]):
            times = again if index == 1 and micros == 2 else 1
            for exchange, count in one.items():
                self.recorder.trace.traffic[exchange] += times * count
