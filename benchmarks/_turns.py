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

from _table import Result, Side, environment, figures_of, nothing_yet


def turns() -> Iterator[None]:
    """In a side: one item a turn, when it is this side's."""
    print("ready", flush=True)
    for _ in sys.stdin:
        yield
        print("done", flush=True)


class _Player:
    """A side's process. One that died takes no more turns; `end` says why."""

    def __init__(self, one: Side, threads: int | None, timeout_s: float) -> None:
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`end` closes it)
        self._process = subprocess.Popen(
            one.command,
            env=environment(one, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        self._timeout_s = timeout_s
        self._alive = self._reads("ready")

    def turn(self) -> None:
        """Lets it do a step, and waits for it."""
        if self._alive:
            assert self._process.stdin is not None
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            self._alive = self._reads("done")

    def end(self) -> dict[str, Any]:
        """Its figures; `RuntimeError` says why there are none."""
        with self._killed_if_late():
            said, _ = self._process.communicate()
        with self._complaints as complaints:
            complaints.seek(0)
            return figures_of(self._process.returncode, said, complaints.read())

    def _reads(self, word: str) -> bool:
        """Whether the process said this, whatever else it prints; it did not where it ended."""
        assert self._process.stdout is not None
        with self._killed_if_late():
            return any(line.strip() == word for line in iter(self._process.stdout.readline, ""))

    @contextlib.contextmanager
    def _killed_if_late(self) -> Iterator[None]:
        late = threading.Timer(self._timeout_s, self._process.kill)
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
) -> Result:
    """Runs all sides `rounds` times, each in a new process that has `steps` turns; one that takes
    longer than `timeout_s` for a turn is killed."""
    result = nothing_yet(sides)
    for number in range(rounds):
        running = [one for one in sides if one.name not in result.failed]
        if number % 2:
            running.reverse()
        # One after the other: what a side measures to make itself ready, it measures alone.
        players = [_Player(one, threads, timeout_s) for one in running]
        for step in range(steps):
            for player in players if step % 2 == 0 else reversed(players):
                player.turn()
        for one, player in zip(running, players, strict=True):
            try:
                result.add(one, player.end())
            except RuntimeError as error:
                result.fail(one, error)
    return result
