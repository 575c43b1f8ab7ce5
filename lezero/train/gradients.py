"""How the gradients of the ranks meet: not at all, under DDP, or over the wires of a sharded model.

The engine asks one of these for everything that differs: which micro-batches a rank runs, what a
backward pass exchanges, and what the norm of all gradients is.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from lezero.comm import watch
from lezero.comm.link import Link
from lezero.core import groups
from lezero.core.decisions import Decisions
from lezero.core.errors import OrderError
from lezero.nn.walk import drop_gradients
from lezero.parallel.zero import Sharding, grad_norm, no_sync, sharding_of
from lezero.parallel.zero.agreement import agree
from lezero.parallel.zero.norm import root_of_sum, squares
from lezero.parallel.zero.sharding import shardings_in
from lezero.train.agreement import Agreed
from lezero.train.counting import Batch
from lezero.train.loss import LossFunction, scalar


class Run(Protocol):
    """Whose gradients they are: the engine."""

    step: int
    """How many steps have ended."""


class Gradients:
    """One rank: nothing meets."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def begin(self) -> None:
        """Before the first micro-batch of a step: drops what a caller or a failed step has left."""
        drop_gradients(self.model)

    def outdated(self) -> int:
        """More than 0 where something else than a step has gone backward through the parameters
        whose gradients meet, or, from `OTHERS` on, others are trained now."""
        return 0

    def agreed(self, found: Agreed) -> None:
        """Before a step of several ranks, with what they told each other: renews what is outdated
        on any. Every rank calls it together."""

    def micros(self, counts: list[int]) -> list[int]:
        """Which micro-batches to run: those in which something counts, and at least one, since
        gradients meet in the last backward and every rank must have one."""
        return [i for i, count in enumerate(counts) if count] or [len(counts) - 1]

    @contextlib.contextmanager
    def micro(self, *, counts: bool, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch; without `counts` it adds nothing, not
        even NaN where the loss is 0 / 0."""
        yield

    def loss(self, function: LossFunction, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch, whose backward pass then fills the gradients."""
        return scalar(function(self.model, batch))

    def forget_owed(self) -> None:
        """After a step whose gradients nobody takes: what encoding lost of them is not owed."""

    def share_buffers(self) -> None:
        """Gives every rank the buffers that a checkpoint keeps. Collective."""

    def of(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients there are, as this rank holds them; of sparse ones, the values."""
        return [_values(p) for p in parameters if p.grad is not None]

    def norm(self, parameters: list[torch.Tensor]) -> float:
        """The 2-norm of all gradients, the same on every rank."""
        found = self.of(parameters)
        places = {x.device for x in found}
        sums = [squares([x for x in found if x.device == place], place) for place in places]
        return root_of_sum([x for some in sums for x in some.tolist()])


def _values(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad._values()  # the memory itself: clipping multiplies it in place


class Replicated(Gradients):
    """torch DDP (see `train/ddp.py`): every rank has everything, gradients meet in buckets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        watch.Watch.start()
        self._silent = False
        self._meeting = 0  # buckets on their way that the watch knows of
        self._met = False  # whether there was any
        self._passes = _Passes()
        weakref.finalize(self, self._passes.watch, ()).atexit = False  # the model may live on
        self._wrap(sync=True)

    def outdated(self) -> int:
        if _trained(self.model) != self._trained:
            return OTHERS
        return int(not self._passes.settled)

    def agreed(self, found: Agreed) -> None:
        if not found.outdated:
            return
        others = found.outdated >= OTHERS
        if others:
            trained = {n: "trained" for n, p in self.model.named_parameters() if p.requires_grad}
            agree("the parameters that are trained", trained)
        self._wrap(sync=others)

    def _wrap(self, sync: bool) -> None:
        """DDP knows for ever which parameters were trained when it was built, and until the end of
        its next backward pass what any other one reached, which it then takes for reached."""
        from lezero.train import ddp

        self._passes.watch(p for p in self.model.parameters() if p.requires_grad)
        self._trained = _trained(self.model)
        self._names = {id(p): name for name, p in self.model.named_parameters()}
        self._wrapped = ddp.around(self.model, sync=sync)
        meet = weakref.WeakMethod(self._meet)  # torch never lets go of a cycle through its hook
        self._wrapped.register_comm_hook(None, lambda _, bucket: meet()(bucket))  # type: ignore[misc]

    def loss(self, function: LossFunction, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = self._wrapped(functools.partial(super().loss, function, batch))
        return found

    def share_buffers(self) -> None:
        """Rank 0's, as DDP gives them to all before the next training step."""
        if self._wrapped.modules_buffers:
            with groups.watched("broadcast", (), None, "buffers of the model"):
                self._wrapped._sync_buffers()

    @contextlib.contextmanager
    def micro(self, *, counts: bool, last: bool) -> Iterator[None]:
        self._silent, self._met = not counts, False
        self._passes.inside, self._passes.settled = True, False
        try:
            with contextlib.nullcontext() if last else self._wrapped.no_sync():
                yield
        except RuntimeError as error:
            why = next((why for said, why in _DDP_SAYS.items() if said in str(error)), "")
            if not why:
                raise
            raise OrderError(
                f"{why}; or shard the model with lz.shard_(model, lz.Zero(stage=0)), which takes it"
            ) from error
        finally:
            self._passes.inside = False
        watcher = watch.current()  # a backward pass returns when all its buckets have met
        for _ in range(self._meeting):
            if watcher is not None:
                watcher.leave()
        self._meeting = 0
        if last and not self._met:
            raise OrderError(
                "the loss of this rank reached no trained parameter of the model, so that no "
                "gradient could meet those of the other ranks: compute it from the model that the "
                "Engine trains"
            )
        self._passes.settled = last

    def _meet(self, bucket: Any) -> Any:
        """Averages a bucket of gradients over the ranks, as DDP does without being told."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self._met = True
        watcher = watch.current()
        if watcher is not None:
            first = self._names[id(bucket.parameters()[0])]
            watcher.enter("all_reduce", bucket.buffer().shape, bucket.buffer().dtype, first)
            self._meeting += 1
        if self._silent:  # a loss that is 0 / 0 where nothing counts has gradients of NaN
            bucket.buffer().zero_()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]


class _Passes:
    """Hears of backward passes that come to parameters, those `inside` of a step and others.

    settled: whether DDP knows of none but those of steps that have ended.
    """

    def __init__(self) -> None:
        self.inside, self.settled = False, True
        self._handles = list[Any]()

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """These from now on, and no others."""
        for handle in self._handles:
            handle.remove()
        self.settled = True
        self._handles = [p.register_post_accumulate_grad_hook(self._reached) for p in parameters]

    def _reached(self, _: torch.Tensor) -> None:
        if not self.inside:
            self.settled = False


OTHERS = 1 << 20
"""More than there are ranks."""
_DDP_SAYS = {
    "ready only once": "a gradient came twice, or after its turn, as behind torch.utils.checkpoint "
    "with use_reentrant=True: checkpoint with use_reentrant=False",
    "undefined, but still allreduced": "the loss went backward through the model by itself, and "
    "then left out a part of it: let it ask torch.autograd.grad for gradients",
}
"""Why torch's DDP ends a step, by its words."""


def _trained(model: nn.Module) -> list[int]:
    return [id(p) for p in model.parameters() if p.requires_grad]


class Sharded(Gradients):
    """A model under `lz.shard_`, which reduces its gradients itself.

    Stages 0 and 1 add up micro-batches on each rank and reduce in the last; from stage 2 on nobody
    keeps whole gradients, so each backward reduces. Every rank runs every micro-batch, since they
    exchange something.
    """

    def __init__(self, model: nn.Module, decisions: Decisions, run: Run) -> None:
        super().__init__(model)
        sharding = sharding_of(model)
        self.stage: int = sharding.stage
        self._backward = getattr(sharding, "backward", None)  # FSDP2 has its own
        self._muted: Any = sharding if self._backward is None else self._backward
        self._alike = True
        if groups.world_size() > 1:
            watch.Watch.start()
        there = weakref.ref(run)  # the model, and with it its wires, may live on
        steps = lambda: None if (alive := there()) is None else alive.step  # noqa: E731
        for link in wires(model).values():
            if link.chooser is not None:
                link.chooser.decisions, link.chooser.steps_of_run = decisions, steps

    def begin(self) -> None:
        super().begin()
        if self._backward is not None and any(b.written for b in self._backward.buckets):
            self._backward.recover()

    def agreed(self, found: Agreed) -> None:
        self._alike = found.alike

    def micros(self, counts: list[int]) -> list[int]:
        return list(range(len(counts)))

    @contextlib.contextmanager
    def micro(self, *, counts: bool, last: bool) -> Iterator[None]:
        self._muted.mute, self._muted.alike = not counts, self._alike
        collect = self.stage < 2 and not last
        try:
            with no_sync(self.model) if collect else contextlib.nullcontext(), self._explained():
                yield
        finally:
            self._muted.mute, self._muted.alike = False, True

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Around a backward: says what a block did whose weights were gone when it needed them."""
        try:
            yield
        except RuntimeError as error:
            if self.stage < 3 or "modified by an inplace operation" not in str(error):
                raise
            raise OrderError(
                "backward found that a tensor it needs has changed (torch's error is above). At "
                "stage 3 it is most likely the weights of a block, which are gathered only while "
                "it runs: a loss that a block computes and hands on in a way of its own (a list "
                "outside, a hook) comes too early, and so does a second derivative; return it from "
                "the block or keep it in an attribute of the block, or use lz.Zero(stage=2)"
            ) from error

    def of(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        found: list[Any] = super().of(parameters)
        return [g.to_local() if hasattr(g, "to_local") else g for g in found]

    def norm(self, parameters: list[torch.Tensor]) -> float:
        return float(grad_norm(parameters))

    def forget_owed(self) -> None:
        for link in wires(self.model).values():
            if link.feedback is not None:
                link.feedback.forget()


def gradients_of(model: nn.Module, decisions: Decisions, run: Run) -> Gradients:
    """The way for this model: `OrderError` for one of which only a part is sharded."""
    if sharding_of(model) is not None:
        return Sharded(model, decisions, run)
    if next(shardings_in(model), None) is not None:
        raise OrderError(
            "only a part of the model is sharded; apply lz.shard_ to the whole model that the "
            "Engine trains"
        )
    return Gradients(model) if groups.world_size() == 1 else Replicated(model)


def wires(model: nn.Module) -> dict[str, Link]:
    """The links of a sharded model by their axis; none where FSDP2 or nobody splits it."""
    sharding = sharding_of(model)
    if not isinstance(sharding, Sharding):
        return {}
    found = {"shard": sharding.lines.shard, "replicate": sharding.lines.replicate}
    return {axis: link for axis, link in found.items() if link is not None}


@contextlib.contextmanager
def wires_untouched(model: nn.Module) -> Iterator[None]:
    """Inside, wires keep what they have: errors stay as they are, and codec auto does not look."""
    with contextlib.ExitStack() as stack:
        for link in wires(model).values():
            stack.enter_context(link.untouched())
        yield
