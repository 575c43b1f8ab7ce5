"""Collectives as one rank entered them: what each was, in which order, and where orders part.

[Note: comparing long orders in small messages]
Every rank numbers its collectives from 1 and keeps a running checksum of them. A `Window` carries
the newest few with the checksum of all before the first, so that two ranks compare the whole past
with one message: where the checksums agree the first difference lies in the window, and where they
do not an earlier window is asked for.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import traceback
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType, MappingProxyType
from typing import Any, NamedTuple

from lezero.core import in_flight
from lezero.core.frames import frames_stay

KEPT = 4096
WINDOW = 32
_KINDS = 1 << 16
_DEEPEST = 48
_WAITS = (in_flight.wait.__code__, in_flight.block.__code__)
Text = tuple[str, tuple[int, ...], str, str]


class Call(NamedTuple):
    """One collective. `site` is where the user's code called it, "file.py:12", and may differ."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    label: str
    site: str = ""

    def same(self, other: Call) -> bool:
        return self[:4] == other[:4]

    def __str__(self) -> str:
        name = f" of '{self.label}'" if self.label else ""
        what = f"{self.dtype} {list(self.shape)}" if self.dtype else str(list(self.shape))
        where = f" at {self.site}" if self.site else ""
        return f"{self.op}{name} ({what}){where}"


@dataclass(frozen=True)
class Window:
    """Calls `first`, `first` + 1, …; `before` is the checksum of all calls before them."""

    first: int
    before: int
    calls: tuple[Call, ...]

    @property
    def last(self) -> int:
        return self.first + len(self.calls) - 1

    def call(self, number: int) -> Call | None:
        return self.calls[number - self.first] if self.first <= number <= self.last else None

    def to_json(self) -> list[Any]:
        return [self.first, self.before, [list(call) for call in self.calls]]

    @classmethod
    def from_json(cls, data: Any) -> Window:
        first, before, calls = data
        return cls(
            int(first),
            int(before),
            tuple(Call(str(o), tuple(s), str(d), str(n), str(w)) for o, s, d, n, w in calls),
        )


NOTHING = Window(1, 0, ())


class History:
    """The newest `KEPT` calls of this rank, `count` in all."""

    def __init__(self) -> None:
        self.count = 0
        self._calls: deque[Call] = deque(maxlen=KEPT)
        self._sums: deque[int] = deque([0], maxlen=KEPT + 1)

    def add(self, call: Call) -> None:
        self.count += 1
        self._calls.append(call)
        self._sums.append(zlib.crc32(repr(call[:4]).encode(), self._sums[-1]))

    def call(self, number: int) -> Call | None:
        """Call `number`; None when it is forgotten or not entered yet."""
        place = number - 1 - (self.count - len(self._calls))
        return self._calls[place] if 0 <= place < len(self._calls) else None

    def window(self, last: int | None = None) -> Window:
        """The newest calls up to number `last`, as far as they are kept."""
        last = self.count if last is None else min(last, self.count)
        oldest = self.count - len(self._calls) + 1
        first = max(oldest, last - WINDOW + 1)
        calls = tuple(self._calls[n - oldest] for n in range(first, last + 1))
        return Window(first, self._sum_before(first) or 0, calls)

    def parting(self, theirs: Window) -> tuple[int, bool] | None:
        """Where another rank's calls part from these, as far as both went.

        None: nowhere. (number, True): call `number` is the first that differs. (number, False):
        they parted at `number` or before, and an earlier window must tell where.
        """
        before = self._sum_before(theirs.first)
        if before is None:
            return None
        if before != theirs.before:
            return theirs.first - 1, False
        for number in range(theirs.first, theirs.last + 1):
            mine, other = self.call(number), theirs.call(number)
            if mine is None or other is None:
                return None
            if not mine.same(other):
                return number, True
        return None

    def usual(self, first: Call | None, second: Call | None, before: int) -> Call | None:
        """What followed `first` and `second` the last time that they came in a row, among the
        calls before number `before`."""
        if first is None or second is None:
            return None
        third: Call | None = None
        middle: Call | None = None
        for number, call in zip(range(self.count, 0, -1), reversed(self._calls), strict=False):
            if number >= before:
                continue
            if middle is not None and middle.same(second) and call.same(first) and third:
                return third
            third, middle = middle, call
        return None

    def _sum_before(self, number: int) -> int | None:
        place = number - 1 - self.count + len(self._sums) - 1
        return self._sums[place] if 0 <= place < len(self._sums) else None


class Kinds(dict[tuple[Any, ...], tuple[int, Text]]):
    """A number and the written form for each (op, shape, dtype, label), made when first asked."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __missing__(self, key: tuple[str, Sequence[int], Any, str]) -> tuple[int, Text]:
        op, shape, dtype, label = key
        if len(self) > _KINDS:  # shapes that never come again
            self.clear()
        name = "" if dtype is None else str(dtype).removeprefix("torch.")
        found = next(self._numbers), (op, tuple(int(n) for n in shape), name, label)
        self[key] = found
        return found


def site_of(
    start: FrameType, lines: Mapping[FrameType, int] = MappingProxyType({})
) -> tuple[CodeType, int]:
    """The innermost frame of the user's own code; without one, of LeZero outside its wires.

    `lines`: of frames that have been elsewhere since.
    """
    frame: FrameType | None = start
    ours: FrameType | None = None
    for _ in range(_DEEPEST):
        if frame is None:
            break
        kind = _kinds.get(frame.f_code)
        if kind is None:
            kind = _kind(frame.f_code)
        if kind == _USER:
            return frame.f_code, lines.get(frame, frame.f_lineno)
        if kind == _OURS and ours is None:
            ours = frame
        frame = frame.f_back
    ours = ours or start
    return ours.f_code, lines.get(ours, ours.f_lineno)


def place_name(code: CodeType, line: int) -> str:
    return f"{_short(code.co_filename)}:{line}"


def place_of(thread: int) -> str:
    """Where the user's code on a thread is now; empty when it or the thread has ended."""
    code, line, frame = place_of.__code__, 0, None
    try:
        with frames_stay():
            frame = sys._current_frames().get(thread)
            if frame is not None:
                code, line = site_of(frame)
        return "" if code is place_of.__code__ else place_name(code, line)
    finally:
        del frame  # it may be that of this call: a circle, with what its callers hold in it


def position_of(thread: int) -> tuple[int, int]:
    """Frame and instruction of a thread: equal while it is held in one call."""
    with frames_stay():
        frame = sys._current_frames().get(thread)
        try:
            return (0, 0) if frame is None else (id(frame), frame.f_lasti)
        finally:
            del frame


def wait_of(thread: int) -> int:
    """The frame in which a thread waits for the backend: equal while it does, 0 outside."""
    with frames_stay():
        frame, found = sys._current_frames().get(thread), 0
        try:
            while frame is not None:
                found = id(frame) if frame.f_code in _WAITS else found
                frame = frame.f_back
            return found
        finally:
            del frame


def origin(error: BaseException) -> str:
    """Where the user's code raised `error`, in brackets; empty when it was never raised."""
    lines = dict(traceback.walk_tb(error.__traceback__))  # a handler may have raised it again
    return f" (at {place_name(*site_of(list(lines)[-1], lines))})" if lines else ""


_USER, _OURS, _OTHER = 0, 1, 2
_kinds: dict[CodeType, int] = {}


def _kind(code: CodeType) -> int:
    """Whose code it is: the user's, LeZero's outside its wires, or another library's."""
    path = os.path.abspath(code.co_filename)
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    between = tuple(os.path.join(ours, part) + os.sep for part in ("comm", "core"))
    stdlib = sysconfig.get_paths()["stdlib"] + os.sep
    if path.startswith(ours + os.sep):
        found = _OTHER if path.startswith(between) else _OURS
    elif path.startswith(stdlib) or "-packages" + os.sep in path or code.co_filename[0] == "<":
        found = _OTHER
    else:
        found = _USER
    return _kinds.setdefault(code, found)


@cache
def _short(name: str) -> str:
    path = os.path.abspath(name)
    here = os.getcwd() + os.sep
    if path.startswith(here):
        return path[len(here) :]
    return os.sep.join(path.split(os.sep)[-2:])
