"""A training step run on fake tensors: which operations it makes and which blocks it holds when.

Nothing is allocated: every tensor has a shape and a dtype but no bytes. The model, autograd, the
autocast weight casts and the optimizer are the real ones, so what the forecast counts is what will
run, for any model. Two steps are recorded: the optimizer's state appears at the end of the first.

Note [Blocks and operations]
A dispatch mode sees every operation that reaches a kernel. A storage not seen before is an
allocation; a weak reference to it tells when its last tensor, saved ones included, is gone. A view
makes neither a new storage nor work. Time counts the second step only.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from lezero.comm.choice import Exchange
from lezero.core.errors import ConfigError
from lezero.ops.attention import FastAttention
from lezero.ops.attention.mode import backward
from lezero.plan.asking import ask
from lezero.plan.calls import Call, plain, real, tensors, text
from lezero.plan.copies import Course, holds_more
from lezero.plan.faking import built, faking, stage
from lezero.plan.kinds import ACTIVATION, BUFFER, GRADIENT, OPTIMIZER, PARAMETER, TEMPORARY
from lezero.plan.lstm import LSTM, with_workspace
from lezero.plan.meeting import Buckets, Meeting, Shards
from lezero.plan.norms import BATCH_NORM, with_statistics
from lezero.plan.scratch import growth
from lezero.plan.spec import PRECISIONS, Build, StepSpec
from lezero.profiler.untouched import untouched

_SKIPPED = {"prim.device.default", "aten.detach.default"}
_ITEM = "aten._local_scalar_dense.default"
_AMENDED = {LSTM: with_workspace, BATCH_NORM: with_statistics}
_SILENT = ("profiler.", "prim.")
_READS = 16  # numbers that an optimizer may read for each parameter: a loop until one is small ends


@dataclass
class Trace:
    """What two fake steps did. Events are (block, bytes): bytes > 0 allocates, -1 frees."""

    events: list[tuple[int, int]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    views: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    """Events before the first call of each kind was done, by its key: what it returns is there."""
    bounds: list[int] = field(default_factory=list)
    """Events before the first step, the second, and the end."""
    holders: list[tuple[int, int, Call]] = field(default_factory=list)
    """Calls that take blocks of their own, of which the trace knows none: events before it, how
    many it returns, and the call."""
    mapped: set[int] = field(default_factory=set)
    """Blocks outside of the heap, in memory that ranks share; never freed."""
    traffic: Counter[Exchange] = field(default_factory=Counter)
    """What a sharded step exchanges, in all its micro-batches."""

    @property
    def largest(self) -> int:
        """Bytes of the largest block that comes and goes within a step."""
        passing = {block for block, size in self.events if size < 0} - self.mapped
        return max((size for block, size in self.events if block in passing), default=0)

    @property
    def mapped_bytes(self) -> int:
        return sum(size for block, size in self.events if block in self.mapped and size > 0)

    def heap_steps(self, count: int, scratch: Mapping[str, int]) -> list[tuple[int, int]]:
        """`steps`, of what lies in the heap; with the blocks that a library of matrix products
        leaves there, `scratch` bytes for calls by their key."""
        events = self.steps(count)
        for number, (size, at) in reversed(list(enumerate(growth(scratch, self.first), 2))):
            events.insert(at, (-number, size))
        number = len(self.kinds)
        return [e for e in events if e[0] < 0 or e[0] % number not in self.mapped]

    def with_copies(self, courses: Mapping[str, Course]) -> Trace:
        """The same, with what calls, by their key, take and give back besides what they return."""
        events, kinds, places = list[tuple[int, int]](), [*self.kinds], dict[int, int]()
        holders = {at: (n, courses[c.key]) for at, n, c in self.holders if c.key in courses}
        at = 0
        while at < len(self.events):
            places[at] = len(events)
            count, course = holders.get(at, (1, ()))
            returned = dict(enumerate(self.events[at : at + count]))
            for block, size in course:
                if block >= 0:
                    events.append((len(kinds) + block, size))
                elif -1 - block in returned:
                    events.append(returned.pop(-1 - block))
            events += returned.values()
            kinds += [TEMPORARY] * (1 + max((block for block, _ in course), default=-1))
            at += count
        places[at] = len(events)
        first = {key: places[place] for key, place in self.first.items()}
        bounds = [places[bound] for bound in self.bounds]
        left = [(places[at], n, call) for at, n, call in self.holders if call.key not in courses]
        return replace(self, events=events, kinds=kinds, first=first, bounds=bounds, holders=left)

    def steps(self, count: int) -> list[tuple[int, int]]:
        """Events of `count` steps: the second one is repeated with blocks of its own."""
        _, second, end = self.bounds
        block_end = len(self.kinds)
        again = self.events[second:end]
        freed = {block for block, size in again if size < 0}
        own = {block for block, size in again if size >= 0 and block in freed}
        again = [event for event in again if event[0] in own]
        events = self.events[:end]
        for index in range(2, count):
            shift = block_end * (index - 1)
            events += [(block + shift, size) for block, size in again]
        return events

    def live(self) -> Iterator[tuple[int, int]]:
        """(index of the event, live bytes after it)."""
        sizes: dict[int, int] = {}
        total = 0
        for index, (block, size) in enumerate(self.events):
            if size >= 0:
                sizes[block] = size
                total += size
            else:
                total -= sizes.pop(block)
            yield index, total

    def peak(self) -> tuple[int, dict[str, int]]:
        """Highest live bytes, and how they divide at that moment."""
        at, highest = max(self.live(), key=lambda pair: pair[1], default=(-1, 0))
        sizes: dict[int, int] = {}
        for block, size in self.events[: at + 1]:
            if size >= 0:
                sizes[block] = size
            else:
                del sizes[block]
        parts: Counter[str] = Counter()
        for block, size in sizes.items():
            parts[self.kinds[block]] += size
        return highest, dict(parts)


class Recorder(TorchDispatchMode):
    """Writes allocations, frees and operations into a `Trace`."""

    def __init__(self, trace: Trace, to_fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.trace = trace
        self._to_fake = to_fake
        self.kind = BUFFER
        self.phase: str | None = None
        self.reads = 0
        """How many numbers may still be read from tensors; see `_number`."""
        self._blocks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._known: dict[int, tuple[Any, int]] = {}

    def adopt(self, tensor: torch.Tensor, kind: str) -> bool:
        """Counts the tensor's storage, or renames its kind; True when it is new."""
        if tensor.layout != torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise ConfigError(
                f"no forecast: a tensor of the step is {kind}, whose size its values decide, as "
                "gradients of nn.Embedding(sparse=True) are; with sparse=False it has one"
            )
        storage = tensor.untyped_storage()
        found = self._known.get(storage._cdata)
        if found is not None:
            return False
        block = len(self.trace.kinds)
        self.trace.kinds.append(kind)
        self.trace.events.append((block, storage.nbytes()))
        cdata = storage._cdata

        def gone(_: Any, cdata: int = cdata, block: int = block) -> None:
            self._known.pop(cdata, None)
            self.trace.events.append((block, -1))

        self._known[cdata] = (weakref.ref(storage, gone), block)
        return True

    def keep(self, tensor: torch.Tensor, kind: str, mapped: bool = False) -> None:
        """Counts a tensor as `kind`, whoever made it."""
        self.adopt(tensor, kind)
        self.rename(tensor, kind)
        if mapped:
            self.trace.mapped.add(self._known[tensor.untyped_storage()._cdata][1])

    def rename(self, tensor: torch.Tensor, kind: str) -> None:
        found = self._known.get(tensor.untyped_storage()._cdata)
        if found is not None:
            self.trace.kinds[found[1]] = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name in _SKIPPED or name.startswith(_SILENT):
            return func(*args, **kwargs)
        if not name.startswith("aten.lift") and any(map(real, tensors([args, *kwargs.values()]))):
            if name == _ITEM:
                with _disable_current_modes():
                    return func(*args)
            # The fake mode would compute with real tensors, and write to them.
            args, kwargs = tree_map(self._unreal, (args, kwargs))
        if name == _ITEM and self.reads:
            self.reads -= 1
            return _number(args[0].dtype)
        call = self._describe(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name in _AMENDED:
            result = _AMENDED[name](args, result)
        before = len(self.trace.events)
        new = [self.adopt(t, self.kind) for t in tensors(result)]
        self.trace.first.setdefault(call.key, len(self.trace.events))
        if new and all(new) and holds_more(name):
            whole = replace(call, outputs=tuple(plain(tensor) for tensor in tensors(result)))
            self.trace.holders.append((before, len(new), whole))
        if self.phase is None:
            return result
        if any(new) or func._schema.is_mutable:
            if call.key not in self.trace.calls:
                outputs = tuple(plain(tensor) for tensor in tensors(result))
                self.trace.calls[call.key] = replace(call, outputs=outputs)
            self.trace.counts.setdefault(self.phase, Counter())[call.key] += 1
        else:
            self.trace.views[self.phase] += 1
        return result

    def _unreal(self, leaf: Any) -> Any:
        """The fake of a real tensor, in the same block."""
        if not real(leaf):
            return leaf
        self.adopt(leaf, self.kind)
        fake = self._to_fake(leaf)
        storage = fake.untyped_storage()
        cdata = storage._cdata
        if cdata not in self._known:
            block = self._known[leaf.untyped_storage()._cdata][1]
            self._known[cdata] = (weakref.ref(storage, lambda _: self._known.pop(cdata)), block)
        return fake

    def _describe(self, func: Any, name: str, args: Any, kwargs: Any) -> Call:
        given = tuple(plain(a) for a in args)
        named = {key: plain(value) for key, value in kwargs.items()}
        return Call(func, given, named, f"{name}{text(given)}{text(sorted(named.items()))}")


def _number(dtype: torch.dtype) -> Any:
    """What an optimizer reads from a tensor, as how many steps it made: 1; and False."""
    with _disable_current_modes():
        return (torch.zeros if dtype == torch.bool else torch.ones)((), dtype=dtype).item()


def trace_step(build: Build, spec: StepSpec, fast_attention: bool = False) -> Trace:
    """Records two steps of the model that `build()` returns, on fake tensors.

    fast_attention: LeZero's attention kernel takes the calls that fit it.

    Raises `ConfigError` when the step cannot run without real numbers, or nothing is trainable.
    """
    if isinstance(build, nn.Module):
        raise ConfigError(
            f"build: got a {type(build).__name__}, allowed is a function that returns the model: "
            "give `lambda: model`"
        )
    trace = Trace()
    with ExitStack() as stack:
        for function in (build, spec.optimizer, spec.loss, spec.inputs):
            stack.enter_context(untouched(function, None))
        fake = stack.enter_context(faking())
        model = stack.enter_context(built(build, spec.device, fake))
        _run(model, spec, trace, Recorder(trace, fake.from_tensor), fast_attention)
    return trace


def _run(
    model: nn.Module, spec: StepSpec, trace: Trace, recorder: Recorder, fast_attention: bool
) -> None:
    model.train()
    shards = Shards(model, spec, recorder) if spec.zero is not None else None
    for parameter in model.parameters():
        recorder.keep(parameter, PARAMETER)
    for buffer in model.buffers():
        recorder.adopt(buffer, BUFFER)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter: nothing to train")
    held = sum(p.numel() for p in model.parameters())
    trace.parameters = held if shards is None else shards.parameters
    trace.state_bytes = {
        PARAMETER: sum(_nbytes(p) for p in model.parameters()),
        GRADIENT: sum(_nbytes(p) for p in trainable),
        BUFFER: sum(_nbytes(b) for b in model.buffers()),
    }
    meeting: Meeting = shards or (Buckets(trainable, recorder) if spec.ranks > 1 else Meeting())
    with stage("making the optimizer"):
        optimizer = spec.make_optimizer(model)
    with untouched(None, optimizer):
        for timed in (False, True):
            trace.bounds.append(len(trace.events))
            with FastAttention() if fast_attention else nullcontext():
                _one_step(model, optimizer, spec, recorder, timed, meeting)
        trace.bounds.append(len(trace.events))
        meeting.finish(model)
        states = [s for state in optimizer.state.values() for s in tensors(list(state.values()))]
    trace.state_bytes[OPTIMIZER] = sum(_nbytes(s) for s in states)


def _one_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    spec: StepSpec,
    recorder: Recorder,
    timed: bool,
    meeting: Meeting,
) -> None:
    """One step in the engine's order. Micro-batches after the second repeat the second."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    dtype = PRECISIONS[spec.precision]
    micros = min(spec.accumulate, 2)
    for index in range(micros):
        recorder.kind = BUFFER
        meeting.begin(last=index == micros - 1)
        with recorder:
            recorder.phase = None
            with stage("making the inputs"):
                batch = spec.make_batch()
            name = ("first", "again")[index] if timed else None
            recorder.kind, recorder.phase = ACTIVATION, name and f"{name} forward"
            if not timed and not index and spec.zero is None:
                ask(model, spec, batch)
            cast = torch.autocast(spec.device, dtype=dtype, cache_enabled=meeting.cache)
            with stage("the loss"), cast if dtype else nullcontext():
                loss = spec.mean_loss(model, batch)
                _check_loss(loss)
                scaled = loss * 1.0
            recorder.kind, recorder.phase = TEMPORARY, name and f"{name} backward"
            with stage("the backward pass"):
                backward(scaled)
            recorder.phase = None
            del loss, scaled, batch
        meeting.end()
        for parameter in trainable:
            if parameter.grad is not None:
                recorder.rename(parameter.grad, GRADIENT)
    with recorder, torch.no_grad():
        recorder.kind, recorder.phase = TEMPORARY, "update" if timed else None
        gradients = meeting.gradients(trainable)
        if not gradients:
            raise ConfigError("the loss reaches no parameter: nothing to train")
        if spec.clip:
            torch._foreach_mul_(gradients, 0.5)
        recorder.kind, recorder.reads = OPTIMIZER, _READS * (len(trainable) + 1)
        with stage("the optimizer's step"):
            optimizer.step()
        recorder.phase, recorder.reads = None, 0
        recorder.kind = BUFFER
        del gradients
        optimizer.zero_grad(set_to_none=True)
    meeting.end()


def _check_loss(loss: Any) -> None:
    found = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1:
            return
        found = f"a tensor of shape {tuple(loss.shape)}"
    raise ConfigError(
        f"loss: returned {found}, allowed is a tensor with one number: give the mean, as .mean()"
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
