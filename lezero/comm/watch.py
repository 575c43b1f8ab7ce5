"""The watch: ranks tell each other what they do, and name the one that hangs or parts from them.

    with Watch.start() as watch:           # on every rank; None where there is one rank
        watch.enter("all_reduce", x.shape, x.dtype, "layers.3.weight")
        dist.all_reduce(x)
        watch.leave()

Twice a second a thread of each rank tells the others which collectives it has entered and where its
code is. A rank whose collective differs from the others', that stopped, died, failed or finished
while others wait for it is named on every other rank, whose wait ends with a `DistributedError`.

[Note: before, not after]
A collective that only one rank makes like that does not just hang: Gloo ends processes whose sizes
differ, and mixes two tensors of one size silently. So a rank about to make a collective that is not
the one to expect (`usual.py`) tells the others at once, and waits a moment for what they enter in
its place. In a steady loop next to nothing is unexpected.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import CodeType, TracebackType
from typing import Any, Self

from lezero.comm import verdict
from lezero.comm.board import Board, wanted
from lezero.comm.calls import (
    Call,
    History,
    Kinds,
    Text,
    Window,
    origin,
    place_name,
    place_of,
    position_of,
    site_of,
    wait_of,
)
from lezero.comm.judge import BEAT_S, Judge
from lezero.comm.usual import Usual
from lezero.comm.verdict import BUSY, FAILED, FINISHED, RUNS, Peer
from lezero.core import groups, observer
from lezero.core.errors import DistributedError
from lezero.core.log import logger, say

log = logger("watch")

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: trying again may help
_ASK_S = 0.25  # how long an unusual collective waits for the others'
_LATE_S = 0.01  # an answer takes 1 or 2 ms of a rank that is there
_VOTE_S = 0.7  # how long the other ranks' calls are collected when two differ
_SHARE, _START_S = 0.005, 2.0  # what asking may take: of the time since the start, and at first


class Watch:
    """One per process; `start` makes it. `enter` and `leave` may be called from any thread.

    patience_s: a rank of another machine may be silent for so long before the wait for it ends
    (one of this machine that is stopped or gone is known at once), and a healthy rank may be waited
    for so long before the log says where it is. grace_s: a thread that is still inside the
    backend so long after its wait was ended takes the process with it, status 75.
    """

    def __init__(self, board: Board, patience_s: float, grace_s: float) -> None:
        now = time.monotonic()
        self.rank = board.rank
        self._board, self._grace_s = board, grace_s
        self._history = History()
        self._judge = Judge(board, self._history, now, patience_s)
        # The hot path: digests as numbers, those not yet in the history, and what is expected.
        self._kinds = Kinds()
        self._fresh: deque[tuple[Text, CodeType, int]] = deque()
        self._usual = Usual()
        self._entered = self._left = 0
        self._attend = False  # something for `enter` to look at
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._count = threading.Lock()
        self._asked: set[int] = set()
        self._state, self._doing, self._since = RUNS, "", now
        self._thread_watched = threading.get_ident()
        self._told: str | None = None
        self._said = False  # raised or logged
        self._held: tuple[object, float] = (0, now)  # where the watched thread is held, since when
        self._asking_s = 0.0
        self._parted: tuple[int, float] | None = None
        self._started = now
        self._pid = os.getpid()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lezero-watch", daemon=True)

    @classmethod
    def start(cls, *, patience_s: float = 30.0, grace_s: float = 10.0) -> Watch | None:
        """Starts the watch of this process; every rank calls it at the same place.

        Returns the one that runs already, if any; None with one rank or with LEZERO_WATCH=0 (on all
        ranks, or it is a `DistributedError` on each). It ends with `close`, with `groups.leave()`
        or with the process.
        """
        running = current()
        if running is not None or groups.world_size() == 1 or not wanted():
            return running
        watch = cls(Board(), patience_s, grace_s)
        observer.observe(watch)
        atexit.register(watch._at_exit)
        watch._thread.start()
        return watch

    # what the ranks' own code calls ------------------------------------------------------------

    def enter(self, op: str, shape: Sequence[int], dtype: Any, label: str) -> None:
        """Before a collective. Raises `DistributedError` when the ranks are known to have parted.

        Every rank enters the same ones in the same order. `shape` must be hashable; pass () where
        shapes rightly differ between ranks.
        """
        kind, text = self._kinds[op, shape, dtype, label]
        self._fresh.append((text, *site_of(sys._getframe(1))))
        self._entered += 1
        usual = self._usual.take(kind)
        if self._attend or not usual:
            self._look_at(not usual)

    def leave(self) -> None:
        """After a collective has completed."""
        with self._count:  # completions may come on several threads
            self._left += 1

    def check(self) -> None:
        """Raises `DistributedError` when another rank was named; for waits that poll."""
        if self._told is not None:
            self._said = True
            raise DistributedError(self._told)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """A long phase without collectives; `what` follows "rank 1, which": "compiles"."""
        before = self._state, self._doing, self._since
        self._state, self._doing, self._since = BUSY, what, time.monotonic()
        try:
            yield
        finally:
            self._state, self._doing, self._since = before

    def failed(self, error: BaseException) -> None:
        """This rank ends, or may end, with `error`; forgotten when it enters another collective."""
        text = next(iter(str(error).strip().splitlines()), "")
        name = type(error).__name__
        self._state, self._doing = FAILED, f"{name}: {text[:300]}{origin(error)}"
        self._attend = True
        self._beat()

    def finished(self) -> None:
        """This rank has left its loop as it should."""
        self._state, self._doing = FINISHED, ""
        self._attend = True
        self._beat()

    def explain(self, error: BaseException) -> str | None:
        """What the backend's `error` about a lost rank means, found out within 0.6 s, or None."""
        end = time.monotonic() + 0.6
        with self._news:
            while self._told is None and time.monotonic() < end:
                self._beat()  # a dead rank's port refuses
                self._news.wait(0.05)  # what it said before is heard before it is judged
                self._look_around(surely=True)
        self._said = self._said or self._told is not None
        return self._told

    def close(self, error: BaseException | None = None) -> None:
        """Ends the watch; the others hear that this rank failed with `error` or has finished."""
        if self._closing or self._pid != os.getpid():
            return
        if error is not None:
            self.failed(error)
        elif self._state != FAILED:
            self.finished()
        self._closing = True
        self._say()
        for _ in range(2):
            self._beat()  # datagrams may be lost
        if current() is self:
            observer.observe(None)
        atexit.unregister(self._at_exit)
        self._board.wake()
        self._thread.join(5)
        self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close(error)

    def _at_exit(self) -> None:
        self.close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    # the rare parts of `enter` -----------------------------------------------------------------

    def _look_at(self, unusual: bool) -> None:
        self.check()
        if self._state in (FAILED, FINISHED):
            self._state, self._doing = RUNS, ""
        number = self._entered
        allowed = _START_S + _SHARE * (time.monotonic() - self._started)
        with self._news:
            self._drain()
            self._attend = False
            answers = {n for n in self._asked if n <= number}
            self._asked -= answers
            self._attend = bool(self._asked)
            for peer in self._judge.peers.values():
                self._compare(peer, peer.window)
            if unusual and self._asking_s < allowed:
                self._ask(number)
            elif answers:
                self._beat()
        self.check()

    def _ask(self, number: int) -> None:
        """Tells the others of call `number` and waits a moment for theirs."""
        started = time.monotonic()
        self._beat(ask=number)
        while self._told is None:
            waited = time.monotonic() - started
            there = self._judge.present()
            pending = any(p.entered < number and p.state in (RUNS, BUSY) for p in there)
            if self._parted is None and (not pending or waited > _ASK_S):
                break
            self._news.wait(_ASK_S - waited if waited < _ASK_S else _LATE_S)
        # A rank that is later than that would be waited for in any case.
        self._asking_s += min(time.monotonic() - started, _LATE_S)

    # the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        due = 0.0
        while not self._closing:
            wait = max(0.0, due - time.monotonic())
            if self._parted is not None:
                wait = min(wait, 0.05)
            for rank, message in self._board.receive(wait):
                with self._news:
                    with contextlib.suppress(ValueError, TypeError, KeyError):  # not one of ours
                        self._hear(self._judge.peers[rank], message)
                    self._news.notify_all()
            now = time.monotonic()
            with self._news:
                if self._parted is not None:
                    self._decide(now)
                if now >= due:
                    due = now + BEAT_S
                    self._beat()
                    self._look_around()

    def _beat(self, to: int | None = None, **more: Any) -> None:
        with self._lock:
            self._drain()
            message = {
                "at": [self._entered, self._left],
                "window": self._history.window(more.pop("last", None)).to_json(),
                "state": [self._state, self._doing, time.monotonic() - self._since],
                "place": place_of(self._thread_watched),
                **more,
            }
            self._board.send(message, to)

    def _hear(self, peer: Peer, message: dict[str, Any]) -> None:
        if "told" in message:
            self._tell(str(message["told"]), pass_on=False)
            return
        window = self._judge.heard(peer, message, time.monotonic())
        self._drain()
        self._compare(peer, window)
        if "ask" in message:
            number = int(message["ask"])
            if self._history.count >= number:
                self._beat(to=peer.rank, last=number + 8)
            else:
                self._asked.add(number)
                self._attend = True

    def _drain(self) -> None:
        while self._fresh:
            text, code, line = self._fresh.popleft()
            self._history.add(Call(*text, place_name(code, line)))

    # when orders part --------------------------------------------------------------------------

    def _compare(self, peer: Peer, window: Window) -> None:
        found = self._history.parting(window)
        if found is None or self._told is not None:
            return
        number, exact = found
        if not exact:
            self._beat(to=peer.rank, ask=number)
        elif self._parted is None or number < self._parted[0]:
            self._parted = number, time.monotonic() + _VOTE_S
            self._beat(ask=number)
            self._decide(time.monotonic())

    def _decide(self, now: float) -> None:
        """Names the odd rank once every living one has told its call, or after a moment."""
        assert self._parted is not None
        number, until = self._parted
        calls = {rank: peer.call(number) for rank, peer in self._judge.peers.items()}
        calls[self.rank] = self._history.call(number)
        known = {rank: call for rank, call in calls.items() if call is not None}
        if all(peer.rank in known for peer in self._judge.present()) or now > until:
            self._parted = None
            if len({call[:4] for call in known.values()}) > 1:
                self._tell(verdict.parted(number, known, self._history))

    # telling -----------------------------------------------------------------------------------

    def _tell(self, text: str, pass_on: bool = True) -> None:
        if self._told is not None:
            return
        self._told, self._attend = text, True
        thread = self._thread_watched
        self._held = wait_of(thread) or position_of(thread), time.monotonic()
        self._news.notify_all()
        if pass_on:
            for _ in range(2):
                self._board.send({"told": text})
        groups.abort()

    def _say(self) -> None:
        """Logs what was told, unless an exception on this rank has said it."""
        if not self._said and self._told is not None:
            self._said = True
            log.error("%s", self._told)

    def _look_around(self, surely: bool = False) -> None:
        now = time.monotonic()
        if self._told is not None:
            self._say()
            self._enforce(now)
            return
        text = self._judge.look(now, self._entered, self._left, surely)
        if text and self._parted is not None:  # the cause; that a rank is lost follows from it
            self._decide(float("inf"))
        if text and self._told is None:
            self._tell(text)

    def _enforce(self, now: float) -> None:
        """The last resort: the backend holds a thread that nothing else can free.

        It is where it was when it was told, or in a wait that it was on its way to.
        """
        waits = wait_of(self._thread_watched)
        if waits and waits != self._held[0]:
            self._held = waits, now
        where, since = self._held
        stays = where == (waits or position_of(self._thread_watched))
        if stays and self._entered > self._left and now - since > self._grace_s:
            say(f"error: {self._told}")
            os._exit(EXIT_STATUS)


def current() -> Watch | None:
    """The watch of this process, if it has one."""
    found = observer.current()
    return found if isinstance(found, Watch) else None


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """`Watch.busy` of the watch of this process; nothing without one."""
    watch = current()
    with watch.busy(what) if watch is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """For a step of a rank's work: an error inside is told to the others, and the backend's report
    of a lost rank becomes a `DistributedError` that names it."""
    try:
        with groups.naming_lost_ranks():
            yield
    except Exception as error:
        watch = current()
        if watch is not None:
            watch.failed(error)
        raise
