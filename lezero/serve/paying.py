"""Speculation only while it pays: its speed is compared with doing without, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lezero.serve.request import Request
from lezero.serve.speculate import Speculator

_TRIAL = 6
"""Steps of a trial."""
_FIRST, _MOST = 64, 2048
"""Steps between trials, at first, and when the verdict is always the same."""
_FADES = 0.95
"""How fast older steps count less."""


class WhilePaying(Speculator):
    """Passes requests on to `inner` while steps with its guesses bring more tokens a second.

    The verdict is one for each power of two of requests that decode, since with more of them a step
    has less room to spare. Steps with prompts are not compared, nor those right after a change, in
    which a draft catches up; one for which `inner` found no guess shows what doing without takes.
    Time chooses only whether to guess, so answers stay the same.
    """

    def __init__(self, inner: Speculator, clock: Callable[[], float] = time.perf_counter) -> None:
        self.inner, self.most, self._clock = inner, inner.most, clock
        self._duels: dict[int, _Duel] = {}
        self._duel, self._guessed, self._changed = _Duel(), False, True
        self._has_guesses = False
        self._began = 0.0

    def guess(self, requests: Sequence[Request]) -> None:
        self._began = self._clock()
        self._duel = self._duels.setdefault(len(requests).bit_length(), _Duel())
        guesses = bool(requests) and self._duel.guesses
        self._changed, self._guessed = guesses != self._guessed, guesses
        if guesses:
            self.inner.guess(requests)
        else:
            self.inner.guess(())
            for request in requests:
                request.drafts = ()
        self._has_guesses = any(request.drafts for request in requests)

    def checked(self, drawn: int, prompts: bool) -> None:
        self.inner.checked(drawn, prompts)
        if drawn and not prompts and not self._changed:
            seconds = self._clock() - self._began
            if self._has_guesses == self._guessed:
                self._duel.count(drawn, seconds)
            else:
                self._duel.add(False, drawn, seconds)

    def close(self) -> None:
        self.inner.close()


class _Duel:
    """Guessing against not guessing: which one goes on, and when the other is tried again."""

    def __init__(self) -> None:
        self.guesses = True
        self._tokens, self._seconds = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        self._left, self._pause = _TRIAL, _FIRST
        self._verdict: bool | None = None
        """What was faster at the last trial."""

    def count(self, tokens: int, seconds: float) -> None:
        """Takes a step of the side that goes on."""
        side = self.guesses
        self.add(side, tokens, seconds)
        self._left -= 1
        if self._left > 0:
            return
        if self._seconds[not side] == 0 or side is self._verdict:
            self._try(not side)
        else:
            self._settle()

    def add(self, side: bool, tokens: int, seconds: float) -> None:
        self._tokens[side] = _FADES * self._tokens[side] + tokens
        self._seconds[side] = _FADES * self._seconds[side] + seconds

    def _try(self, side: bool) -> None:
        self.guesses, self._left = side, _TRIAL
        self._tokens[side] = self._seconds[side] = 0.0

    def _settle(self) -> None:
        faster = self._speed(True) > self._speed(False)
        same = faster is self._verdict
        self._pause = min(2 * self._pause, _MOST) if same else _FIRST
        self.guesses = self._verdict = faster
        self._left = self._pause

    def _speed(self, side: bool) -> float:
        return self._tokens[side] / max(self._seconds[side], 1e-9)
