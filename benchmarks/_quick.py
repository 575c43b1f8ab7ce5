"""Runs the short form of every benchmark, as CI does; fails when one fails.

A benchmark passes when it ends with status 0 and its last line is one JSON object. Two run side
by side: a short form shows that a benchmark works, and its times are no figures. For the same
reason threads that wait sleep, so that the other one has the core, and what is measured of the
machine is kept in a cache of its own, which is gone afterwards; native kernels are those of the
user's cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lezero.core.facts import cache_folder

FOLDER = Path(__file__).resolve().parent
SIDE_BY_SIDE = 2


def check(path: Path, cache: str) -> str:
    """Runs one benchmark and shows what it said; returns "" or why it does not pass."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, path, "--quick"],
        cwd=FOLDER.parent,
        env={**os.environ, "LEZERO_CACHE": cache, "OMP_WAIT_POLICY": "passive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    problem = verdict(done.returncode, done.stdout)
    took = f"=== {time.monotonic() - began:.1f} s{': ' + problem if problem else ''}"
    said = f"{done.stderr}{done.stdout}".strip()
    print(f"\n=== benchmarks/{path.name} --quick\n{said}\n{took}", flush=True)
    return problem


def verdict(status: int, said: str) -> str:
    """Why a benchmark that said this does not pass, or ""."""
    if status:
        return f"status {status}"
    try:
        last = json.loads(said.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return "its last line is not JSON"
    return "" if isinstance(last, dict) else "its last line is no JSON object"


def main() -> int:
    # Backwards: the last two by name, zero and wires, take longest and so begin.
    paths = sorted(FOLDER.glob("[!_]*.py"), reverse=True)
    with (
        tempfile.TemporaryDirectory(prefix="lezero-quick-") as cache,
        ThreadPoolExecutor(SIDE_BY_SIDE) as pool,
    ):
        native = cache_folder() / "native"
        native.mkdir(parents=True, exist_ok=True)
        Path(cache, "native").symlink_to(native)
        problems = list(pool.map(lambda path: check(path, cache), paths))
    for path, problem in sorted(zip(paths, problems, strict=True)):
        if problem:
            print(f"error: {path.name}: {problem}", file=sys.stderr)
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main())
