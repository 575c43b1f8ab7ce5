"""Whether waiting for a rank makes sense: what is known of the others, judged twice a second."""

from __future__ import annotations

from typing import Any

from lezero.comm import verdict
from lezero.comm.board import Board, process_state
from lezero.comm.calls import History, Window
from lezero.comm.verdict import BUSY, FAILED, FINISHED, Peer
from lezero.core.log import logger

log = logger("watch")

BEAT_S = 0.5
MISSED_S = 2.0  # four beats
_AHEAD_S = 5.0  # a rank that ended may just be ahead of us at the end
_UNHEARD_S = 5.0  # the first beat comes at once


class Judge:
    """Keeps the `peers`. `history` is this rank's; `entered` and `left` count its collectives."""

    def __init__(self, board: Board, history: History, now: float, patience_s: float) -> None:
        self._board, self._history, self._patience_s = board, history, patience_s
        self.peers = {r: Peer(r, now) for r in range(board.world) if r != board.rank}
        self._entered = self._left = 0
        self._waits_since = self._looked = now
        self._waited_for: dict[int, int] = {}
        self._silent: set[int] = set()
        self._refused: dict[int, float] = {}

    def present(self) -> list[Peer]:
        """The peers whose process is not known to be gone."""
        return [peer for peer in self.peers.values() if peer.rank not in self._board.gone]

    def heard(self, peer: Peer, message: dict[str, Any], now: float) -> Window:
        """Takes in what `peer` says of itself; returns the calls it told."""
        peer.heard, peer.known = now, True
        self._silent.discard(peer.rank)
        peer.entered, peer.left = (int(n) for n in message["at"])
        peer.state, peer.doing, age = message["state"]
        peer.since, peer.place = now - float(age), str(message["place"])
        window = Window.from_json(message["window"])
        if window.last >= peer.window.last:
            peer.older.append(peer.window)
            peer.window = window
        else:
            peer.older.append(window)
        return window

    def look(self, now: float, entered: int, left: int, surely: bool = False) -> str:
        """What is wrong with another rank, or nothing. `surely`: the backend has lost one."""
        if left != self._left or entered == left:
            self._waits_since = now
        self._entered, self._left = entered, left
        late, self._looked = now - self._looked > MISSED_S, now
        if late and not surely:  # this process was stopped or starved: what it missed is its own
            for peer in self.peers.values():
                peer.heard = now
            return ""
        for peer in self.peers.values():
            text = self._fault(peer, now, surely)
            if text:
                return f"{text}.{self._around(peer)}"
        for peer in self.peers.values():  # a rank is lost, and no other explains it
            if surely and peer.state == FINISHED and peer.left < self._entered > self._left:
                return f"{verdict.finished(peer)}.{self._around(peer)}"
        self._say_who_is_waited_for(now)
        return ""

    def _fault(self, peer: Peer, now: float, surely: bool) -> str:
        """Why waiting for `peer` makes no sense, or nothing."""
        waited = surely or now - self._waits_since > BEAT_S
        stuck = self._entered > self._left and self._entered > peer.left
        if peer.state == FINISHED:
            early = self._entered > self._left and self._entered > peer.entered
            return verdict.finished(peer) if early and waited else ""
        if peer.state == FAILED:
            return verdict.failed(peer) if stuck and waited else ""
        silent = now - peer.heard
        pid, near = self._board.addresses[peer.rank].pid, self._board.near(peer.rank)
        if not near and not peer.known:
            return self._unheard(peer, silent)
        state = process_state(pid) if near and (silent > MISSED_S or surely) else "?"
        refused = peer.rank in self._board.gone and (near or surely or silent > MISSED_S)
        if refused or not state:
            since = self._refused.setdefault(peer.rank, now)
            late = surely or now - since > _AHEAD_S
            return verdict.gone(peer, pid) if late or (stuck and waited) else ""
        if silent <= MISSED_S:
            return ""
        if state == "T":
            return verdict.stopped(peer, silent, pid)
        if state == "?" and silent > self._patience_s:
            return verdict.silent(peer, silent)
        if peer.rank not in self._silent:
            self._silent.add(peer.rank)
            runs = f". Its process {pid} runs, so it may only hold the interpreter" if near else ""
            log.warning("%s%s.%s", verdict.silent(peer, silent), runs, self._around(peer))
        return ""

    def _unheard(self, peer: Peer, since_s: float) -> str:
        """Nothing is wrong that we know of: what a firewall drops or refuses looks like the silence
        of a dead rank. It is told once."""
        if since_s > _UNHEARD_S and peer.rank not in self._silent:
            self._silent.add(peer.rank)
            log.warning("%s", verdict.unheard(peer))
        return ""

    def _say_who_is_waited_for(self, now: float) -> None:
        waited = now - self._waits_since
        if self._entered == self._left or waited < self._patience_s:
            return
        peers = [peer for peer in self.peers.values() if peer.rank not in self._silent]
        behind = [peer for peer in peers if peer.entered < self._entered]
        # Whoever began the same exchange may not come to its end, since it waits elsewhere.
        for peer in behind or [peer for peer in peers if peer.left <= self._left]:
            if self._waited_for.get(peer.rank) != self._entered:
                self._waited_for[peer.rank] = self._entered
                level = log.info if peer.state == BUSY else log.warning
                level("%s.%s", verdict.waited_for(peer, waited, now), self._around(peer))

    def _around(self, peer: Peer) -> str:
        """What `peer` did last and what this rank waits in: the end of a message about it."""
        text = f" It {peer.tells(self._history, self._left)}"
        number = max(self._left, min(peer.entered, self._entered - 1)) + 1
        call = self._history.call(number) if self._entered > self._left else None
        if call is None:
            return text
        return f"{text}; rank {self._board.rank} waits in collective {number}, {call}"
