"""What is wrong between the ranks, in words: which rank, which collective, what it does instead."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from lezero.comm.calls import NOTHING, Call, History, Window

RUNS, BUSY, FAILED, FINISHED = "runs", "busy", "failed", "finished"


@dataclass
class Peer:
    """What is known of another rank. Times are this process's monotonic seconds.

    known: it was heard at least once. doing: what a busy rank does, or the error of a failed one.
    place: where its own code is. `entered` and `left` count its collectives.
    """

    rank: int
    heard: float
    entered: int = 0
    left: int = 0
    known: bool = False
    state: str = RUNS
    doing: str = ""
    since: float = 0.0
    place: str = ""
    window: Window = NOTHING
    older: deque[Window] = field(default_factory=lambda: deque(maxlen=8))

    def call(self, number: int) -> Call | None:
        found = (w.call(number) for w in (self.window, *reversed(self.older)))
        return next((call for call in found if call is not None), None)

    def tells(self, history: History, done: int) -> str:
        """Its newest collective and place, in words that follow "It ".

        `history` and `done`: this rank's collectives and how many of them are complete. What is
        complete here every rank has entered, which may be more than it could still tell.
        """
        number = max(self.entered, done)
        newest = self.call(number) or history.call(number)
        if newest is None:
            return "had entered no collective"
        how = "had finished" if self.left >= number else "was in"
        if self.entered < number:
            how = "had come to"
        elsewhere = self.place and self.entered == number and not str(newest).endswith(self.place)
        at = f" and was at {self.place}" if elsewhere else ""
        return f"{how} collective {number}, {newest}{at}"


def parted(number: int, calls: Mapping[int, Call], history: History) -> str:
    """The ranks' calls at `number` differ: who is odd, and what it does instead of what.

    The odd ones are those that most others disagree with; where no majority is, those that leave
    the order in which this job's collectives have come so far; at last all but the lowest rank's.
    """
    right = _right(number, calls, history)
    agreeing = [rank for rank, call in sorted(calls.items()) if call.same(right)]
    right = calls[agreeing[0]]
    odd = [(rank, call) for rank, call in sorted(calls.items()) if not call.same(right)]
    told = [f"rank {rank} entered {call}{_how(number, call, right, history)}" for rank, call in odd]
    return (
        f"the ranks parted at collective {number}: {' and '.join(told)}, where "
        f"{ranks(agreeing)} entered {right}"
    )


def _right(number: int, calls: Mapping[int, Call], history: History) -> Call:
    votes = Counter(call[:4] for call in calls.values())
    (most, count), *_ = votes.most_common(1)
    usual = history.usual(history.call(number - 2), history.call(number - 1), number)
    if count * 2 > len(calls) or usual is None or usual[:4] not in votes:
        top = [key for key, n in votes.items() if n == count]
        lowest = min(calls)
        most = calls[lowest][:4] if calls[lowest][:4] in top else most
        return next(call for call in calls.values() if call[:4] == most)
    return usual


def _how(number: int, call: Call, right: Call, history: History) -> str:
    """In which way `call` differs from the `right` one; empty where the two names say it."""
    if call[0] == right[0] and call[3] == right[3]:
        what = [n for n, i in (("shape", 1), ("dtype", 2)) if call[i] != right[i]]
        return f" with another {' and '.join(what)}"
    following = history.usual(history.call(number - 1), right, number)
    if following is not None and call.same(following):
        return f" and skipped {_name(right)}"
    return ""


def _name(call: Call) -> str:
    return f"'{call.label}'" if call.label else call.op


def stopped(peer: Peer, silent_s: float, pid: int) -> str:
    return (
        f"rank {peer.rank} does not answer since {silent_s:.1f} s: its process {pid} is stopped "
        f"(SIGSTOP; `kill -CONT {pid}` wakes it)"
    )


def silent(peer: Peer, silent_s: float) -> str:
    return (
        f"rank {peer.rank} does not answer since {silent_s:.1f} s: its process or machine is "
        "stopped, or the network to it is down"
    )


def unheard(peer: Peer) -> str:
    return (
        f"rank {peer.rank} cannot be heard: datagrams (UDP) from its machine do not arrive here, "
        "so it is not watched. Allow UDP between the machines and give every rank MASTER_ADDR; "
        "LEZERO_WATCH=0 switches the watch off"
    )


def gone(peer: Peer, pid: int) -> str:
    return (
        f"rank {peer.rank} is gone: its process {pid} was killed, crashed or ended without a word"
    )


def failed(peer: Peer) -> str:
    return f"rank {peer.rank} failed: {peer.doing}"


def finished(peer: Peer) -> str:
    many = "1 collective" if peer.entered == 1 else f"{peer.entered} collectives"
    return f"rank {peer.rank} has finished early, after {many}: it has left its loop"


def waited_for(peer: Peer, waited_s: float, now: float) -> str:
    """A healthy rank that others wait for; information, not a verdict."""
    doing = f"is at {peer.place}" if peer.place else "computes"
    if peer.state == BUSY:
        doing = f"{peer.doing} since {now - peer.since:.0f} s"
    return f"waiting since {waited_s:.0f} s for rank {peer.rank}, which {doing}"


def ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
