"""The shared frame of the benchmarks: sides in their own processes, interleaved, in one run.

A benchmark is one file with one claim. It names its sides, each a command whose last line on stdout
is one JSON object of figures:

    sides = [side(__file__, "lezero"), side(__file__, "torch")]
    result = compare(sides, rounds=5)
    result.ratio("step_s", "lezero", "torch")
    finish(result.table(["step_s"]), {"my_ratio": …})

and starts with `options = arguments(__doc__)`; when `options.side` is set, the process is one side:
it measures, prints with `emit` and returns. `finish` ends with status 1 where a side of this
environment failed.

[Note: what makes the figures comparable]
Rounds are interleaved (a b, b a, a b …), so that a drifting machine touches all sides alike. Each
side is a fresh process with the same number of threads. A figure of a side is the median over its
rounds, and a ratio is the median of the rounds' ratios. A side that fails is a row that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS_PYTHON = ROOT / ".peers" / "bin" / "python"
_ENDS = (signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 5


def arguments(
    about: str | None, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """The options that every benchmark has: --quick, --rounds, --threads, --side.

    From here on SIGTERM and SIGHUP end this process as Ctrl-C does, by an exception: sides are in
    sessions of their own and would go on, and what a side made (folders, networks) would stay.
    """
    parser = parser or argparse.ArgumentParser()
    parser.description = (about or "").strip().split("\n")[0]
    parser.add_argument("--quick", action="store_true", help="a short form that CI runs")
    parser.add_argument("--rounds", type=int, help="rounds of every side")
    parser.add_argument("--threads", type=int, help="threads of a side (default: usable cores)")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads is None:
        options.threads = len(os.sched_getaffinity(0))
    for number in _ENDS:
        if signal.getsignal(number) is signal.SIG_DFL:  # under `nohup` it is not
            signal.signal(number, _end)
    return options


def _end(number: int, frame: FrameType | None) -> None:
    for each in _ENDS:  # `timeout` sends it twice
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


@contextlib.contextmanager
def nothing_measured() -> Iterator[None]:
    """A cache folder without figures of this machine; what was built in the user's is used."""
    from lezero.core import facts

    built, before = facts.cache_folder() / "native", os.environ.get("LEZERO_CACHE")
    built.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lezero-cache-") as folder:
        (Path(folder) / "native").symlink_to(built)
        os.environ["LEZERO_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["LEZERO_CACHE"]
            if before is not None:
                os.environ["LEZERO_CACHE"] = before


@dataclass(frozen=True)
class Side:
    """One row: a command that prints its figures as one JSON object on its last line."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    """Why this side cannot run here; then it is a row that says so."""


def side(
    file: str,
    name: str,
    *extra: str,
    python: str | Path = sys.executable,
    env: dict[str, str] | None = None,
    missing: str = "",
) -> Side:
    """This benchmark's own file run as one side, by any interpreter."""
    return Side(name, (str(python), file, "--side", name, *extra), env or {}, missing)


def peer(file: str, name: str, module: str, *extra: str) -> Side:
    """A side that runs in `.peers`; missing where `make peers` has not installed `module`."""
    if not PEERS_PYTHON.exists():
        return side(file, name, *extra, missing="run `make peers` first")
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    found = subprocess.run([PEERS_PYTHON, "-c", probe], capture_output=True).returncode == 0
    reason = "" if found else f"{module} is not in .peers"
    return side(file, name, *extra, python=PEERS_PYTHON, missing=reason)


_broken: list[str] = []


@dataclass
class Result:
    """Figures of every side and round."""

    figures: dict[str, list[dict[str, Any]]]
    failed: dict[str, str]

    def add(self, one: Side, figures: dict[str, Any]) -> None:
        """Keeps a round's figures, and says them on stderr: whole benchmarks take long."""
        self.figures[one.name].append(figures)
        shown = ", ".join(f"{key} {_plain(value)}" for key, value in figures.items())
        _say(f"{one.name}, round {len(self.figures[one.name])}: {shown}")

    def fail(self, one: Side, error: Exception) -> None:
        """Notes why a side gave no figures; one of this environment breaks the benchmark."""
        self.failed[one.name] = f"failed: {error}"
        _say(f"{one.name} {self.failed[one.name]}")
        if one.command[0] == sys.executable:
            _broken.append(f"{one.name}: {error}")

    def median(self, name: str, key: str) -> float:
        return statistics.median(float(row[key]) for row in self.figures[name])

    def ratio(self, key: str, one: str, other: str, by: str = "") -> float:
        """Median over the rounds of `key` on side `one` divided by that, or `by`, on side `other`:
        what moves the machine's speed from round to round moves both."""
        pairs = zip(self.figures[one], self.figures[other], strict=False)  # one may have failed
        return statistics.median(float(a[key]) / float(b[by or key]) for a, b in pairs)

    def table(self, keys: Sequence[str], base: str | None = None) -> str:
        """A table for people: medians of `keys`, and the ratio of the first key to side `base`."""
        head = ["side", *keys, *([f"× {base}"] if base else []), "rounds"]
        rows = [head]
        for name, found in self.figures.items():
            if name in self.failed:
                rows.append([name, self.failed[name]])
                continue
            cells = [_shown(self.median(name, key)) if key in found[0] else "–" for key in keys]
            if base:
                both = base not in self.failed and keys[0] in found[0]
                cells.append(f"{self.ratio(keys[0], name, base):.3f}" if both else "–")
            rows.append([name, *cells, str(len(found))])
        return columns(rows)


def _say(line: str) -> None:
    print(line if len(line) <= 200 else f"{line[:199]}…", file=sys.stderr, flush=True)


def _shown(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[at]) for row in full) for at in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    lines = []
    for row in rows:
        rest = (
            row[1:]
            if row not in full
            else [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        lines.append("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def compare(
    sides: Sequence[Side], *, rounds: int, threads: int | None = None, timeout_s: float = 1200
) -> Result:
    """Runs every side `rounds` times, interleaved, each run in its own process."""
    result = nothing_yet(sides)
    for number in range(rounds):
        for one in sides if number % 2 == 0 else list(reversed(sides)):
            if one.name in result.failed:
                continue
            try:
                result.add(one, run(one, threads, timeout_s))
            except RuntimeError as error:
                result.fail(one, error)
    return result


def nothing_yet(sides: Sequence[Side]) -> Result:
    """Where figures go; a side that cannot run has failed."""
    failed = {one.name: f"missing: {one.missing}" for one in sides if one.missing}
    return Result({one.name: [] for one in sides}, failed)


def run(one: Side, threads: int | None = None, timeout_s: float = 1200) -> dict[str, Any]:
    """Runs one side once; `RuntimeError` says why it gave no figures."""
    process = subprocess.Popen(
        one.command,
        env=environment(one, threads),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complained = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done in {timeout_s:g} s") from None
    finally:  # also at Ctrl-C, which another session does not see
        kill_all(process)
        process.communicate()
    return figures_of(process.returncode, said, complained)


def kill_all(process: subprocess.Popen[str]) -> None:
    """Ends a side, in a session of its own, and what it started: ranks hold its pipes. One that
    still runs has some seconds to take down what it made (see `arguments`)."""
    try:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(_GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def environment(one: Side, threads: int | None) -> dict[str, str]:
    """What a side's process sees."""
    places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": places, "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # A side of another environment must see its own packages only.
    if one.command[0] != sys.executable:
        del env["PYTHONPATH"]
    return env | one.env


def figures_of(status: int, said: str, complained: str) -> dict[str, Any]:
    """The figures that a side printed; `RuntimeError` says why there are none."""
    if status:
        lines = [line for line in complained.splitlines() if line.strip()] or ["no message"]
        raise RuntimeError(f"status {status}: {lines[-1].strip()[:200]}")
    try:
        figures = json.loads(said.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError("printed no JSON object as its last line") from None
    if not isinstance(figures, dict):
        raise RuntimeError("printed no JSON object as its last line")
    return figures


def emit(**figures: Any) -> None:
    """What a side prints at its end."""
    print(json.dumps(figures), flush=True)


def finish(table: str, figures: dict[str, Any]) -> None:
    """What a benchmark prints at its end: the table, then one JSON object as the last line. Ends
    with status 1 where a side failed that is no peer, since then what is claimed was not seen."""
    print(table)
    print(json.dumps({key: _plain(value) for key, value in figures.items()}), flush=True)
    if _broken:
        sys.exit("error: not measured: " + "; ".join(_broken))


def _plain(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


class Memory:
    """Resident memory of this process above what it held when this was made, in bytes.

    Make it after the imports. `steady()` is now; with `shared=True` it counts pages shared with
    other processes in part (PSS), as ranks on one machine need it.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._base = self._now()

    def steady(self) -> int:
        return self._now() - self._base

    def _now(self) -> int:
        name, key = ("smaps_rollup", "Pss:") if self._shared else ("status", "VmRSS:")
        for line in Path(f"/proc/self/{name}").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/{name} has no {key}")


def best_of(function: Any, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls of `function`, after one call that does not count."""
    import time

    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return times
