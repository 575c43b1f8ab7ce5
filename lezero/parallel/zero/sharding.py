"""What `lz.shard_` leaves on a model: its units, and who does what when.

Outside of compute the model's parameters are shards, so an optimizer, a `state_dict` or a norm
sees what this rank keeps. A unit's parameters are whole from before its forward until after it, and
again while its backward runs. Who calls what: a unit's module calls `Unit.enter` and `leave` around
its own call; autograd calls the unit before its backward, `Backward.arrived` with every gradient
and `Backward._end` at the end; the optimizer's step calls `stepping` and `stepped` (see `guard`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lezero.core.errors import OrderError
from lezero.memory.pool import give_back_free_blocks
from lezero.parallel.zero.backward import Backward
from lezero.parallel.zero.config import Zero
from lezero.parallel.zero.fsdp import FsdpSharding
from lezero.parallel.zero.gradients import Bucket, Lent
from lezero.parallel.zero.held import Held
from lezero.parallel.zero.layout import Part
from lezero.parallel.zero.lines import Lines
from lezero.parallel.zero.structure import Structure
from lezero.parallel.zero.unit import Unit

SHARDING = "_lezero_sharding"


class Sharding:
    """The sharding of one model; `sharding_of(model)` gives it.

    `units`: blocks in order, the root last. `parameters`: by name, tied ones under their first.
    `started`: no lasting copy is known to lack the values that its parameters have now.
    """

    def __init__(self, config: Zero, lines: Lines, units: list[Unit]) -> None:
        self.config, self.stage, self.lines, self.units = config, config.stage, lines, units
        helds = sorted((h for unit in units for h in unit.helds), key=lambda held: held.index)
        self.parameters: dict[str, Held] = {held.name: held for held in helds}
        self.lent = Lent(lines, limit=2 if config.stage >= 2 else None)
        buckets = [Bucket(s, lines, self.lent) for unit in units for s in unit.segments]
        buckets.sort(key=lambda bucket: -min(held.index for held in bucket.segment.helds))
        gated = config.stage == 3
        self.backward = Backward(
            buckets, self.lent, helds, self._release, self._sums_came, gated=gated
        )
        for unit in units:
            unit.sharding = self
        places = [place for held in helds for place in held.places]
        self.structure = Structure(self.root.module, places)
        self._stepped = self._summed = False
        self.started = False
        self._last: dict[str, Unit | None] = {"forward": None, "backward": None}
        self._next: dict[tuple[str, Unit], Unit] = {}

    @property
    def root(self) -> Unit:
        return self.units[-1]

    @property
    def layout(self) -> dict[str, Part]:
        """What this rank holds, by every name of every parameter."""
        return {
            name: Part(held.rows.shape, *held.rows.range(self.lines.rank))
            for held in self.parameters.values()
            for name in held.names
        }

    def local(self, name: str) -> torch.Tensor:
        """This rank's rows of a parameter, as the memory that training uses."""
        return self._held(name).local()

    @torch.no_grad()
    def write(self, name: str, rows: torch.Tensor) -> None:
        """Sets this rank's rows of a parameter; on every rank, before the next forward."""
        held = self._held(name)
        held.local().copy_(rows)
        held.segment.unit.changed()

    def stepping(self) -> None:
        """An optimizer is about to step: what sums of 16 bits were rounded from is let go where no
        second backward has ever added to them, before the optimizer takes memory for its state."""
        self.lent.adds_up = self.lent.added
        if not self.lent.added:
            for bucket in self.backward.buckets:
                bucket.forget_totals()

    def stepped(self, helds: set[int]) -> None:
        """An optimizer has changed these (`id` of `Held`); lasting copies are gathered at once."""
        for unit in self.units:
            if any(id(held) in helds for held in unit.helds):
                unit.changed()
                if unit.slots is None:
                    unit.start()
        self.started = all(u.valid or u.gathering for u in self.units if u.slots is None)
        if not self._stepped and self.lines.place.type == "cpu":
            give_back_free_blocks()  # what the first step needed beside the optimizer's state
        self._stepped = True

    def gather(self) -> None:
        """Makes the copies whole that last from step to step (stages 1 and 2); on every rank.

        A forward pass does it by itself, the first one after a step, a load or a change by hand:
        where only some ranks are about to run one, all of them call this before.
        """
        with torch.inference_mode(False), torch.no_grad():  # the copies live on into training
            self.start_lasting()
            for unit in self.units:
                if unit.slots is None:
                    unit.finish()

    def account(self) -> dict[str, Any]:
        """Bytes that this rank sent, by axis, as the links count them."""
        found = {"shard": self.lines.shard, "replicate": self.lines.replicate}
        return {axis: getattr(link, "account", None) for axis, link in found.items() if link}

    def synchronize(self, on: bool) -> bool:
        """Whether backward reduces from now on; returns what was."""
        before, self.backward.sync = self.backward.sync, on
        return before

    def close(self) -> None:
        """Gives the links' groups and memory back, on every rank; the model is of no use then."""
        self.lines.close()

    def _sums_came(self) -> None:
        self._summed = True

    def values_changed(self) -> None:
        """Parameters change: the sums that have come since the last time were those of a step."""
        self.started = False
        if self._summed:
            self._summed = False
            self.lines.step_done()

    # called by units ---------------------------------------------------------------------------

    def entered(self, unit: Unit) -> None:
        """A unit's module begins to compute."""
        task = torch._C._current_graph_task_id()
        outside = task == -1
        if self.backward.active and outside:
            self.backward.recover()
            self._release()
        if self.backward.active:
            self.finish_others(unit, task)
        if outside and not any(u.depth for u in self.units):
            self.structure.check()
            self._check_lasting()
            self._last["forward"] = None

    def _check_lasting(self) -> None:
        """Notices on every rank alike what was changed by hand, also in a layer that this rank
        leaves out: the others are about to gather it."""
        if self.lines.shard is not None:
            for unit in self.units:
                if unit.slots is None and unit.altered:
                    unit.check()

    def start_lasting(self) -> None:
        """Starts to gather what `gather` makes whole: all of it, since a rank may go on to another
        layer than the others do."""
        for unit in self.units:
            if unit.slots is None:
                unit.check()
                unit.start()
        self.started = True

    def watch(self, held: Held) -> None:
        """Has autograd hand over the gradient of `held.full`, and of a parameter that is not split
        also what comes to it outside of its unit's calls."""
        for leaf in (held.full, held.sharded if held.segment.link is None else None):
            if leaf is None or not leaf.requires_grad or hasattr(leaf, "_lezero_watched"):
                continue
            if leaf is held.sharded:
                leaf.register_hook(_weakly(self.backward.set_aside, held))
            leaf._lezero_watched = leaf.register_post_accumulate_grad_hook(  # type: ignore[attr-defined]
                _weakly(self.backward.arrived, held)
            )

    def finish_others(self, unit: Unit, within: int | None = None) -> None:
        """`unit` begins its backward, so that of the other blocks is over; or it is recomputed in
        the backward `within`, so that those which began in one inside of it are over."""
        for other in self.units[:-1]:
            inside = within is None or (other.task is not None and other.task > within)
            if other is not unit and other.in_backward and not other.depth and inside:
                other.in_backward = False
                other.hide()

    def prefetch_after(self, unit: Unit) -> None:
        """Starts to gather the unit that followed `unit` the last time."""
        phase = "backward" if self.backward.active else "forward"
        last = self._last[phase]
        if last is not None and last is not unit:
            self._next[phase, last] = unit
            self._next.setdefault(("backward", unit), last)
        self._last[phase] = unit
        following = self._next.get((phase, unit))
        if following is not None and not following.computing:
            following.check()
            if following.can_start():
                following.start()

    def _release(self) -> None:
        """Backward is over, or was given up."""
        self._last["backward"] = None
        for unit in self.units:
            unit.in_backward, unit.task = False, None
            if not unit.depth:
                unit.hide()

    def _held(self, name: str) -> Held:
        for held in self.parameters.values():
            if name in held.names:
                return held
        raise OrderError(f"the sharded model has no parameter '{name}'")


def _weakly(call: Callable[..., None], held: Held) -> Callable[[torch.Tensor], None]:
    """A hook of a tensor that calls `call(held, tensor)` and keeps neither: torch never lets go of
    a cycle through a tensor's hook."""
    method, mine = weakref.WeakMethod(call), weakref.ref(held)

    def hook(leaf: torch.Tensor) -> None:
        found, owner = method(), mine()
        if found is not None and owner is not None:  # they live as long as the model
            found(owner, leaf)

    return hook


def sharding_of(model: nn.Module) -> Any:
    """The `Sharding` of `model` (an `FsdpSharding` under FSDP2); None without `lz.shard_`."""
    return model.__dict__.get(SHARDING)


def shardings_in(model: nn.Module) -> Iterator[Sharding | FsdpSharding]:
    """Of `model` and of the models inside it."""
    for module in model.modules():
        found = sharding_of(module)
        if found is not None:
            yield found


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward adds up gradients on each rank without reducing them.

        with lz.no_sync(model):
            loss(first half).backward()
        loss(second half).backward()        # reduces the sum of both

    They are kept whole in fp32 until the next backward outside: 4 bytes a parameter at every stage;
    `.grad` says nothing until then, but `zero_grad` drops them. Without it each backward reduces,
    and the gradients add up in the shards. Same on every rank.
    """
    found = list(shardings_in(model))
    if not found:
        raise OrderError("no_sync: the model is not sharded; apply lz.shard_ first")
    before = [sharding.synchronize(False) for sharding in found]
    try:
        yield
    finally:
        for sharding, sync in zip(found, before, strict=True):
            sharding.synchronize(sync)
