"""Sides that live at the same time and take their steps in turns.

Where a ratio of 2% is to be seen, minutes between two sides are too long: the machine's speed moves
by more. So all sides of a round are started, each in a process of its own, and then one is given a
turn while the others wait, step by step, in an order that turns round.

A side makes itself ready, then does one step a turn, and ends with its figures:

    for _ in turns():
        step()
    emit(step_s=…)
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from _table import Result, Side, environment, figures_of, kill_all, nothing_yet


def turns() -> Iterator[None]:
    """In a side: one item a turn, when it is this side's."""
    print("ready", flush=True)
    for _ in sys.stdin:
        yield
        print("done", flush=True)


class _Player:
    """A side's process. One that died takes no more turns; `end` says why."""

    def __init__(self, one: Side, threads: int | None) -> None:
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`end` closes it)
        self._process = subprocess.Popen(
            one.command,
            env=environment(one, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            start_new_session=True,
        )
        self._alive = False

    def ready(self, timeout_s: float) -> None:
        """Waits until it is."""
        self._alive = self._reads("ready", timeout_s)

    def turn(self, timeout_s: float) -> None:
        """Lets it do a step, and waits for it."""
        if self._alive:
            assert self._process.stdin is not None
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            self._alive = self._reads("done", timeout_s)

    def kill(self) -> None:
        """Kills it, and what it started."""
        kill_all(self._process)

    def end(self, timeout_s: float) -> dict[str, Any]:
        """Its figures; `RuntimeError` says why there are none."""
        with self._killed_if_late(timeout_s):
            said, _ = self._process.communicate()
        with self._complaints as complaints:
            complaints.seek(0)
            return figures_of(self._process.returncode, said, complaints.read())

    def _reads(self, word: str, timeout_s: float) -> bool:
        """Whether the process said this, whatever else it prints; it did not where it ended."""
        assert self._process.stdout is not None
        with self._killed_if_late(timeout_s):
            return any(line.strip() == word for line in iter(self._process.stdout.readline, ""))

    @contextlib.contextmanager
    def _killed_if_late(self, timeout_s: float) -> Iterator[None]:
        late = threading.Timer(timeout_s, self.kill)
        late.start()
        try:
            yield
        finally:
            late.cancel()


def compare_in_turns(
    sides: Sequence[Side],
    *,
    rounds: int,
    steps: int,
    threads: int | None = None,
    timeout_s: float = 1200,
    ready_s: float = 1200,
) -> Result:
    """Runs all sides `rounds` times, each in a new process that has `steps` turns; one that takes
    longer than `ready_s` to be ready, or than `timeout_s` for a turn, is killed."""
    result = nothing_yet(sides)
    for number in range(rounds):
        running = [one for one in sides if one.name not in result.failed]
        if number % 2:
            running.reverse()
        with contextlib.ExitStack() as at_end:
            players = []
            for one in running:
                players.append(_Player(one, threads))
                at_end.callback(players[-1].kill)  # also at Ctrl-C, which they do not see
                # One after the other: what it measures to make itself ready, it measures alone.
                players[-1].ready(ready_s)
            for step in range(steps):
                for player in players if step % 2 == 0 else reversed(players):
                    player.turn(timeout_s)
            for one, player in zip(running, players, strict=True):
                try:
                    result.add(one, player.end(timeout_s))
                except RuntimeError as error:
                    result.fail(one, error)
    return result
