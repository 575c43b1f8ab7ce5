"""Seconds of single operations, measured on this machine at the shapes that a step really uses.

A step repeats few distinct operations (a transformer of any depth: under a hundred). Each is run
alone on made-up tensors for a few milliseconds, so the ceilings are those of this machine, at this
shape, dtype and layout, the transposed products of backward included. Inputs rotate through an
arena larger than the caches, since in a step they come from memory too. What is too large to try
is run smaller along one dim and scaled by its operations or bytes. Results are kept per machine.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lezero.core import device, facts
from lezero.memory import HostPool, can_come_from_malloc
from lezero.plan.arguments import argument_sets, release
from lezero.plan.calls import Call, TensorFact, text
from lezero.plan.copies import Course, course_at, course_of, holds_more, parts, sound
from lezero.plan.scratch import scratch_of
from lezero.plan.spec import StepSpec
from lezero.plan.work import ACCELERATOR, HOST, roughly, shrink, small_enough, work_bytes

FORMAT = 6
_ISA = "ONEDNN_MAX_CPU_ISA"
_DAMAGE = (
    OSError, ValueError, ArithmeticError, AttributeError, TypeError, LookupError, RecursionError,
)  # fmt: skip
"""What reading a file of figures may raise; they are measured anew."""
_EACH_SECONDS = 0.06
_SLOW_SECONDS = 0.5
_PATIENCE_S = 0.1
_PASSES = 4


class Timed(NamedTuple):
    """seconds of a call; quiet: whether the machine was quiet enough to keep them; scratch: bytes
    that the library of matrix products takes for it and keeps."""

    seconds: float
    quiet: bool
    scratch: int = 0


class OpTimes:
    """Measured seconds of operations, kept in a file of the cache folder, and their scratch bytes.

    identity: what the figures depend on (processor, torch, threads). path: the file, or None to
    keep nothing. place: the kind of device that operations run on.
    """

    def __init__(self, identity: str, path: Path | None, place: str = "cpu") -> None:
        self.identity, self.path, self.place = identity, path, place
        self.seconds: dict[str, float] = {}
        self._scratch: dict[str, int] = {}
        self._courses: dict[str, Course] = {}
        self.measured = 0
        if path is not None and path.is_file():
            with contextlib.suppress(*_DAMAGE):
                data = json.loads(path.read_text(encoding="utf-8"))
                if data.get("format") == FORMAT and data.get("identity") == identity:
                    self.seconds = {str(k): float(v) for k, v in data["seconds"].items()}
                    self._scratch = {str(k): int(v) for k, v in data["scratch"].items()}
                    courses = {
                        str(k): tuple((int(block), int(size)) for block, size in course)
                        for k, course in data["courses"].items()
                    }
                    self._courses = {k: course for k, course in courses.items() if sound(course)}

    @classmethod
    def of_this_machine(cls, spec: StepSpec) -> OpTimes:
        """Figures of this machine for a step's threads and host pool, in the cache folder."""
        identity = f"{_machine_id()} threads {threads_of(spec)} pool {spec.pool} {spec.device}"
        identity += f" oneDNN {torch.backends.mkldnn.enabled} {os.environ.get(_ISA)}"
        name = hashlib.sha1(identity.encode()).hexdigest()[:12]
        return cls(identity, facts.cache_folder() / f"operations-{name}.json", spec.device)

    def measure(
        self, calls: Iterable[Call], *, neighbours: int = 1, budget_s: float = 8.0
    ) -> dict[str, float]:
        """Seconds of every call, keyed as they are. After `budget_s` the rest is estimated from
        operations and bytes. neighbours: ranks that compute at the same time.

        What was measured while other programs ran is measured again once the rest is done, as
        long as the budget lasts; the best figure counts, and only undisturbed ones are kept.
        """
        until = time.perf_counter() + budget_s
        found: dict[str, float] = {}
        late: list[Call] = []
        waiting = []
        for call in sorted(calls, key=roughly, reverse=True):
            name = _short(call.key, neighbours)
            if name in self.seconds:
                found[call.key] = self.seconds[name]
            else:
                waiting.append(call)
        for _ in range(_PASSES):
            disturbed = []
            for call in waiting:
                in_time = time.perf_counter() < until
                timed = time_call(call, neighbours, self.place) if in_time else None
                if timed is None:
                    late.append(call)
                    continue
                seconds, quiet, scratch = timed
                found[call.key] = seconds if quiet else min(seconds, found.get(call.key, seconds))
                name = _short(call.key, neighbours)
                self._scratch[name] = scratch
                if quiet:
                    self.seconds[name] = seconds
                    self.measured += 1
                else:
                    disturbed.append(call)
            waiting = disturbed
        late = [call for call in late if call.key not in found]
        if late:
            rate = self._rate()
            found |= {call.key: max(work_bytes(call) / rate, roughly(call)) for call in late}
        release()
        if self.measured:
            self._save()
        return found

    def scratch(self, calls: Iterable[Call], neighbours: int = 1) -> dict[str, int]:
        """Bytes that the library of matrix products takes for each of the calls that need some,
        of those that were measured."""
        names = {call.key: _short(call.key, neighbours) for call in calls}
        return {key: self._scratch[name] for key, name in names.items() if self._scratch.get(name)}

    def courses(self, calls: Iterable[Call]) -> dict[str, Course]:
        """What each of the calls that make copies of their own takes and gives back meanwhile, by
        its key; tried where it is not known."""
        if self.place != "cpu" or not can_come_from_malloc():
            return {}
        found, known = dict[str, Course](), len(self._courses)
        calls = {call.key: call for call in calls if holds_more(str(call.op))}.values()
        for call in calls:
            with contextlib.suppress(*_DAMAGE, RuntimeError):
                if tried := parts(call):
                    few, more = map(self._course, tried)
                    if few is not None and more is not None:
                        found[call.key] = course_at(call.args[0].shape[0], *tried, (few, more))
        if calls:
            release()
        if len(self._courses) > known:
            self._save()
        return found

    def _course(self, call: Call) -> Course | None:
        name = _short(f"{call.op}{text(call.args)}", 1)
        if name not in self._courses and (course := course_of(call)) is not None:
            self._courses[name] = course
        return self._courses.get(name)

    def _rate(self) -> float:
        """Bytes/s of a plain elementwise operation; what a call that cannot be tried is given."""
        fact = TensorFact((8 << 20,), (1,), torch.float32)
        timed = time_call(Call(torch.ops.aten.add.Tensor, (fact, fact), {}, "rate"), 1, self.place)
        return 3 * (32 << 20) / timed[0] if timed else 1e10

    def _save(self) -> None:
        if self.path is None:
            return
        known = {"format": FORMAT, "identity": self.identity, "seconds": self.seconds}
        scratch = {name: n for name, n in self._scratch.items() if n}
        data = {**known, "scratch": scratch, "courses": self._courses}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside = self.path.with_suffix(f".{os.getpid()}.tmp")
            aside.write_text(json.dumps(data), encoding="utf-8")
            aside.replace(self.path)


@functools.cache
def _machine_id() -> str:
    return facts.machine_id()


def threads_of(spec: StepSpec) -> int:
    """Threads that one rank computes with on this machine."""
    if spec.ranks == 1:
        return torch.get_num_threads()
    return max(1, facts.usable_cores() // spec.neighbours)


@contextlib.contextmanager
def as_in_a_step(spec: StepSpec) -> Iterator[None]:
    """Threads and host pool as the step will have them; as before afterwards."""
    threads = torch.get_num_threads()
    limit = facts.memory_limit() // spec.neighbours
    pool = HostPool(limit) if spec.pool and spec.device == "cpu" else None
    torch.set_num_threads(threads_of(spec))
    try:
        if pool is not None:
            pool.enable()
        yield
    finally:
        torch.set_num_threads(threads)
        if pool is not None:
            pool.disable()


def time_call(call: Call, neighbours: int = 1, place: str = "cpu") -> Timed | None:
    """One call on made-up tensors; None when it cannot run by itself. Of an accelerator, each rank
    has its own."""
    most = HOST if place == "cpu" else ACCELERATOR
    smaller, scale = shrink(call, most)
    if not small_enough(smaller, most) or _is_opaque(call):
        return None
    others = neighbours - 1 if place == "cpu" else 0
    try:
        with torch.no_grad():
            turn = itertools.cycle(argument_sets(smaller, place))

            def run() -> Any:
                args, kwargs = next(turn)
                return smaller.op(*args, **kwargs)

            scratch = scratch_of(run)  # before others run the call as well
            if scratch:
                run()  # memory that was given back comes in again
            with _company(smaller, others):
                seconds, quiet = _time(run, torch.device(place))
            return Timed(seconds * scale, quiet, scratch)
    except Exception:
        return None


def _is_opaque(call: Call) -> bool:
    """Whether it reads a workspace that another call fills in a way of its own: made up, the
    process may end in it."""
    return "_rnn" in call.key and "_backward" in call.key


def _time(run: Callable[[], Any], place: torch.device) -> tuple[float, bool]:
    """Median of a few runs after one that warms up; fewer of slow ones, more of quick ones, and of
    one that takes longer than `_SLOW_SECONDS` the first. In a run before, kernels may be made.

    What other programs add is no property of this machine: a run during which one of our threads
    waited for a processor does not count. When there is no other, the best of them is given, and
    the second value is False. `place`: where it computes, which is waited for.
    """
    quiet: list[float] = []
    disturbed: list[float] = []

    def timed(inner: int) -> float:
        waited, begin = _waiting(), time.perf_counter()
        for _ in range(inner):
            run()
        device.synchronize([place])
        wall = time.perf_counter() - begin
        longest = max((after - waited.get(t, after) for t, after in _waiting().items()), default=0)
        (quiet if longest < 0.02 * wall else disturbed).append(wall / inner)
        return wall

    if (first := timed(1)) > _SLOW_SECONDS:
        return first, bool(quiet)
    quiet.clear()
    disturbed.clear()
    repeats = 2 if first > _EACH_SECONDS else 3 if first > _EACH_SECONDS / 8 else 7
    inner = max(1, min(20, int(2e-4 / max(first, 1e-7))))
    patience = time.perf_counter() + max(_PATIENCE_S, 4 * first)
    while len(quiet) < repeats and (not disturbed or time.perf_counter() < patience):
        timed(inner)
    return statistics.median(quiet) if quiet else min(disturbed), bool(quiet)


def _waiting() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a processor; empty if unknown."""
    waits = {}
    for task in glob.iglob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError), open(task) as file:
            waits[task] = int(file.read().split()[1]) / 1e9
    return waits


@contextlib.contextmanager
def _company(call: Call, others: int) -> Iterator[None]:
    """Other ranks share memory and caches: they run the same call meanwhile, on own threads."""
    if others < 1:
        yield
        return
    stop = threading.Event()
    threads = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(threads)
        with torch.no_grad(), contextlib.suppress(Exception):
            turn = itertools.cycle(argument_sets(call))
            while not stop.is_set():
                args, kwargs = next(turn)
                call.op(*args, **kwargs)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(others)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def _short(key: str, neighbours: int) -> str:
    return hashlib.sha1(f"{neighbours} {key}".encode()).hexdigest()[:20]
