"""A unit: modules whose parameters are gathered together before they compute, and let go after.

[Note: slots]
Under stage 3 the whole copies of equal blocks live in two slots by turns: block i in slot i mod 2,
so the next block can be gathered while one computes. Autograd keeps views of a slot for backward,
and finds the right values there, since a unit's gather before its backward fills the same slot.
That this cannot go wrong unseen is held by autograd's own check: when a slot changes hands, the
version counters of the leaves that lose it move on, and back once they have it again and their
values have arrived. Intervals of backward do not overlap, since autograd runs nodes in the reverse
order of forward.

[Note: where a unit's backward begins]
At the first gradient of a tensor that the unit made and that can be found when its call ends: in
what it returns, whatever holds it, and in the attributes of its modules (a loss kept in `self`).
A call that made none, since it returns what it was given, hands on views of that: on another rank
the same call may have computed, and all gather alike.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from lezero.core.errors import OrderError
from lezero.core.function_modes import past_modes
from lezero.parallel.zero.held import Held, register
from lezero.parallel.zero.instead import adopt, stands_in_whole
from lezero.parallel.zero.segment import Segment, Whole
from lezero.parallel.zero.tensors import new_tensors, returned

if TYPE_CHECKING:
    from lezero.parallel.zero.sharding import Sharding

UNIT = "_lezero_unit"


def _show(held: Held, parameter: nn.Parameter) -> None:
    """Registers `parameter` where no tensor stands in for it."""
    for module, attribute in held.places:
        if attribute not in module._parameters:
            continue  # `check` tells of it
        found = module._parameters[attribute]
        if found is held.sharded or found is held.full or not stands_in_whole(held.name, found):
            register(module, attribute, parameter)


def passed_on(value: Any) -> Any:
    """A view of a tensor that gradients can come to: new, so that a unit can listen to it."""
    return (
        value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value
    )


class Slot:
    """Memory for the whole copies of a unit; `holder` is the unit whose values are in it."""

    def __init__(self, unit: Unit) -> None:
        self.wholes = [Whole(segment) for segment in unit.segments]
        self.holder: Unit | None = None
        parts = [part for whole in self.wholes for part in (whole.flat, *whole.views)]
        self._places = {part.untyped_storage()._cdata for part in parts}

    def shows(self, value: object) -> bool:
        """Whether it is a tensor in this memory."""
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            return False
        strided = value.layout is torch.strided
        return strided and value.untyped_storage()._cdata in self._places


class Call:
    """One forward call of a unit, for as long as its graph lives."""


class Unit:
    """`name` is the module's path ("" for the root). `task`: autograd's number of the backward in
    which that of this unit has begun, None before. `awaited`: calls whose graph lives and had no
    backward; a rank's own affair, of which only rank 0's tells (`plan`). `shares`: the module has
    parameters that the root holds, since another module has them too."""

    def __init__(self, name: str, module: nn.Module, segments: list[Segment], index: int) -> None:
        self.name, self.module, self.segments, self.index = name, module, segments, index
        self.helds: list[Held] = [held for segment in segments for held in segment.helds]
        for segment in segments:
            segment.unit = self
        self.sharding: Sharding
        self.slots: list[Slot] | None = None
        self.slot: Slot | None = None
        self.shares = False
        self.depth = 0
        self.in_backward = False
        self.task: int | None = None
        self.awaited: weakref.WeakSet[Call] = weakref.WeakSet()
        self.gathering = False
        self.valid = False
        self.stale = True
        self._evicted = False
        self._versions: list[tuple[int, int]] = []
        self._shown: list[int] = []

    @property
    def signature(self) -> tuple[object, ...]:
        return tuple(segment.signature for segment in self.segments)

    @property
    def is_root(self) -> bool:
        return self is self.sharding.root

    @property
    def over(self) -> bool:
        """Whether the backward of a block is over, as all ranks see it, whichever gradients have
        come; another call of it may still follow. Of the root: always."""
        return self.is_root or (self.task is not None and not self.in_backward)

    @property
    def altered(self) -> bool:
        """Whether parameters were changed by hand since it was last known."""
        return [held.version() for held in self.helds] != self._versions

    @property
    def computing(self) -> bool:
        return self.depth > 0 or self.in_backward

    @property
    def alone(self) -> bool:
        """Whether a call of it would find the root's parameters split. After a backward that failed
        they seem whole until a call outside of it begins."""
        root = self.sharding.root
        return not root.depth and not (root.in_backward and torch._C._current_graph_task_id() != -1)

    # called by the module -------------------------------------------------------------------

    def enter(self) -> None:
        """Before the module computes: its parameters become whole."""
        self.sharding.entered(self)
        self.depth += 1
        if self.depth == 1 and not self.in_backward:
            try:
                self.unshard()
            except BaseException:
                self.depth -= 1
                raise

    def cast(self, args: Any, keywords: Any) -> tuple[Any, Any]:
        """The inputs of the model, floating ones in the type that it computes in."""
        compute = self.sharding.config.compute
        if compute == "auto" or self is not self.sharding.root:
            return args, keywords
        dtype = self.sharding.config.compute_dtype(torch.float32)

        def to(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        cast: tuple[Any, Any] = tree_map(to, (args, keywords))
        return cast

    def leave(self, output: Any) -> Any:
        """After the module computed, or raised (`output` None); returns what to hand on."""
        self.depth -= 1
        if self.depth == 0 and output is not None:
            self._check_unwritten()
        if self.slots is not None:
            output = self._without_aliases(output)
        if torch.is_grad_enabled():
            output = self._listen(output)
        if self.depth == 0 and not self.in_backward:
            if self.sharding.backward.active:  # recomputed: its backward comes next
                self.in_backward = True
            else:
                self.hide()
        return output

    def _without_aliases(self, output: Any) -> Any:
        """The output, where it shows a slot's memory in copies: another unit computes there next.
        The same for what the modules keep in attributes."""
        slot = self.slot
        assert slot is not None
        for part in self.module.modules():
            for name, value in vars(part).items():
                if slot.shows(value):
                    part.__dict__[name] = value.clone()
        if any(map(slot.shows, returned(output))):
            output = tree_map(lambda value: value.clone() if slot.shows(value) else value, output)
        if any(map(slot.shows, returned(output))):
            raise OrderError(
                f"block '{self.name}' returns a weight, or a view of one, inside a "
                f"{type(output).__name__}, and at stage 3 another block's values take its memory; "
                "return weight.clone(), or use lz.Zero(stage=2)"
            )
        return output

    def _check_unwritten(self) -> None:
        """Raises `OrderError` where forward wrote into a whole copy, which a gather replaces."""
        for held, version in zip(self.helds, self._shown, strict=False):
            if held.full is None or held.segment.alias or held.full._version == version:
                continue
            raise OrderError(
                f"parameter '{held.name}' was written in forward, into a copy of its values that "
                "the next use replaces; change it between steps (parameter.clamp_ and the like "
                "under torch.no_grad()), make it a buffer, or use lz.Zero(stage=0, compute='auto')"
            )

    def _listen(self, output: Any) -> Any:
        """Has autograd tell when the backward of this call begins (see the note)."""
        call = Call()
        shared = self.slots is not None and not self.is_root
        found = new_tensors(self.module if shared else None, output)
        if shared and not found:
            output = tree_map(passed_on, output)
            found = new_tensors(None, output)
        for tensor in found:
            tensor.register_hook(functools.partial(past_modes(self._before_backward), call))
        if not self.sharding.backward.active:
            self.awaited.add(call)
            self.sharding.backward.due = True
        return output

    def _before_backward(self, call: Call, gradient: torch.Tensor) -> None:
        sharding = self.sharding
        sharding.backward.begin()
        self.awaited.discard(call)
        self.task = torch._C._current_graph_task_id()
        if not self.in_backward:
            sharding.finish_others(self)
            self.in_backward = True
            if self.depth == 0:
                self.unshard()

    # gathering --------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gathers, and registers the whole parameters."""
        self.sharding.backward.gate(self)
        self.check()
        if not self.sharding.started and not self.sharding.backward.active:
            self.sharding.start_lasting()
        self.start()
        self.finish()
        for held in self.helds:
            full = held.full
            assert full is not None
            if full.requires_grad != held.sharded.requires_grad:
                full.requires_grad_(held.sharded.requires_grad)
                self.sharding.watch(held)
            _show(held, full)
        self._shown = [held.full._version for held in self.helds if held.full is not None]
        self.sharding.prefetch_after(self)
        self.sharding.backward.launch()

    def hide(self) -> None:
        """Registers the shards again."""
        for held in self.helds:
            _show(held, held.sharded)

    def start(self) -> None:
        """Starts to gather, unless the whole copies are there."""
        if not self.valid and not self.gathering:
            self._claim()
            for segment in self.segments:
                segment.gather()
            self.gathering = True

    def finish(self) -> None:
        if self.gathering:
            for segment in self.segments:
                segment.finish_gather()
            self.gathering, self.valid = False, True
            if self._evicted:
                self._move(-1)
                self._evicted = False

    def can_start(self) -> bool:
        """Whether a gather ahead of use would take memory from nobody."""
        if self.valid or self.gathering or self.slots is None:
            return True
        slot = self.slot or self._usual_slot()
        other = slot.holder
        return other is None or other is self or not (other.computing or other.gathering)

    def changed(self) -> None:
        """The parameters have other values now."""
        self.sharding.values_changed()
        self.finish()
        self.valid, self.stale = False, True
        self._versions = [held.version() for held in self.helds]

    def check(self) -> None:
        """Notices parameters changed by hand, and those that were replaced or converted."""
        for held in self.helds:
            if held.sharded.is_meta:
                raise OrderError(
                    f"parameter '{held.name}' is still on meta, without memory; call "
                    "lz.materialize_(model) before it computes or loads a state"
                )
            for module, attribute in held.places:
                found = module._parameters.get(attribute)
                ours = found is held.sharded or found is held.full
                if not ours and not stands_in_whole(held.name, found):
                    adopt(held.name, held.sharded, found)
                    held.show(held.sharded)
                    self._versions = []
            held.check_memory()
        if self.altered:
            self.changed()

    def _claim(self) -> None:
        """Makes the leaves on first use, and takes the slot over from another unit."""
        if self.slots is not None:
            slot = self.slot or self._usual_slot()
            if slot.holder not in (None, self) and slot.holder.computing:
                slot = self._other_slot(slot)
            if self.slot is not slot:
                self.slot, self._evicted = slot, False
                self._bind(slot.wholes)
            if slot.holder is not self:
                if slot.holder is not None:
                    slot.holder.evict()
                slot.holder = self
        elif self.helds and self.helds[0].full is None:
            self._bind([segment.whole for segment in self.segments])
        if self.stale:
            self._move(1)
            self.stale = False

    def evict(self) -> None:
        """Another unit takes the slot."""
        self.finish()
        self.valid, self._evicted = False, True
        self._move(1)

    def _move(self, step: int) -> None:
        for segment in self.segments:
            segment.move_version(step)

    def _usual_slot(self) -> Slot:
        assert self.slots is not None
        while len(self.slots) <= self.index % 2:
            self.slots.append(Slot(self))
        return self.slots[self.index % 2]

    def _other_slot(self, taken: Slot) -> Slot:
        """The usual slot is in use by a unit around this one: this unit moves to another."""
        assert self.slots is not None
        for slot in self.slots:
            if slot is not taken and (slot.holder is None or not slot.holder.computing):
                return slot
        self.slots.append(Slot(self))
        return self.slots[-1]

    def _bind(self, wholes: list[Whole | None] | list[Whole]) -> None:
        for segment, whole in zip(self.segments, wholes, strict=True):
            segment.bind(whole)
        for held in self.helds:
            self.sharding.watch(held)
