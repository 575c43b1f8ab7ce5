"""Resident memory of this process: now, its peak over a stretch of code, and its fair share.

Note [Exact peaks]
A thread that looks every few milliseconds misses short peaks, and looks late while the interpreter
is busy. The kernel misses nothing: it keeps the highest resident set (VmHWM) and starts it anew
when 5 is written to `/proc/self/clear_refs`. `MemorySampler` does that where it may, and takes the
larger of the two figures. Samplers may nest: before one starts the mark anew, the others keep it.

Note [Pages of files]
Libraries' code and mapped data are not counted: the kernel shares such pages and takes them back
when it needs memory, and how many of them a process shows as resident depends on the kernel and on
what its page cache holds (torch's kernels alone: 5 to 40 MiB for the same step).
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

_NOTICED = 1 << 20  # bytes of change in resident shared memory that are worth a walk
_lock = threading.Lock()
_running: list[MemorySampler] = []


def rss() -> int:
    """Resident bytes of this process, without pages of files (see the note)."""
    found = _without_files("/proc/self/status", "VmRSS:", "RssFile:")
    if found is not None:
        return found
    import psutil

    return int(psutil.Process().memory_info().rss)


def pss() -> int:
    """Proportional bytes: a page shared by n processes counts as 1/n; without pages of files, as
    `rss()`, which it is where that is not known.

    Reading it walks the page tables (about 1 ms a GiB): not for a hot loop.
    """
    found = _without_files("/proc/self/smaps_rollup", "Pss:", "Pss_File:")
    return rss() if found is None else found


class SharedElsewhere:
    """Bytes of shared memory that are resident here but are other processes' to count (as `pss`).

    `rss()` and `peak_rss()` count every shared page whole; subtract this for what a rank costs. The
    page tables are walked only when the resident shared memory has changed; 0 where not known.
    """

    def __init__(self) -> None:
        self._mine, self._found = 0, 0

    def bytes(self) -> int:
        mine = _kilobytes("/proc/self/status", "RssShmem:")[0] or 0
        if abs(mine - self._mine) >= _NOTICED:
            (proportional,) = _kilobytes("/proc/self/smaps_rollup", "Pss_Shmem:")
            self._mine = mine
            self._found = 0 if proportional is None else max(0, mine - proportional)
        return self._found


def peak_rss() -> int:
    """The highest resident bytes since the process began or since `reset_peak_rss`, without the
    pages of files that are resident now (see the note)."""
    found = _without_files("/proc/self/status", "VmHWM:", "RssFile:")
    if found is not None:
        return found
    import resource
    import sys

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def reset_peak_rss() -> bool:
    """Starts `peak_rss` anew; False where the kernel does not allow it."""
    with _lock:
        for sampler in _running:
            sampler._absorb()
        return _reset()


class MemorySampler:
    """Measures the peak resident memory of what runs inside it, above a baseline.

        with MemorySampler() as memory:
            train()
        memory.above      # bytes above what was resident on entry

    baseline: bytes to subtract; by default what is resident on entry, so everything imported and
    allocated before does not count. interval_s: how often the thread looks; keep_samples: whether
    `samples` gets (seconds since entry, bytes) of every look. `exact` tells whether the kernel's
    own mark was used (see Note [Exact peaks]); if not, a peak between two looks can be missed. The
    thread is joined on exit, also when the code inside raises.
    """

    def __init__(
        self, interval_s: float = 0.005, baseline: int | None = None, keep_samples: bool = False
    ) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s: got {interval_s!r}, allowed is a number above 0")
        self.interval_s, self.keep_samples = interval_s, keep_samples
        self._given = baseline
        self.baseline = self.peak = 0
        self.exact = False
        self.samples: list[tuple[float, int]] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._began = 0.0

    @property
    def above(self) -> int:
        """Peak bytes above the baseline so far; never negative."""
        return max(0, self.peak - self.baseline)

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError("this MemorySampler is running already")
        self.samples, self._began = [], time.perf_counter()
        self.peak = rss()
        self.baseline = self.peak if self._given is None else self._given
        with _lock:
            for sampler in _running:
                sampler._absorb()
            self.exact = _reset()
            _running.append(self)
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="memory-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._look()
        with _lock:
            if self.exact:
                self._absorb()
            _running.remove(self)

    def now(self) -> int:
        """Resident bytes above the baseline now; may be negative."""
        return rss() - self.baseline

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._look()

    def _look(self) -> None:
        found = rss()
        self.peak = max(self.peak, found)
        if self.keep_samples:
            self.samples.append((time.perf_counter() - self._began, found))

    def _absorb(self) -> None:
        if self.exact:
            self.peak = max(self.peak, peak_rss())


def _reset() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _without_files(path: str, all_: str, files: str) -> int | None:
    whole, of_files = _kilobytes(path, all_, files)
    return None if whole is None or of_files is None else max(0, whole - of_files)


def _kilobytes(path: str, *names: str) -> tuple[int | None, ...]:
    """The bytes behind each name, which stand in kB in a file of one name a line."""
    found: dict[str, int] = {}
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                words = line.split()
                if words and words[0] in names:
                    found[words[0]] = int(words[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return tuple(found.get(name) for name in names)
