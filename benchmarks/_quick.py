"""Runs the short form of every benchmark, as CI does; fails when one fails.

A benchmark passes when it ends with status 0 and its last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def check(path: Path) -> str:
    """Runs one benchmark; returns "" or why it does not pass."""
    done = subprocess.run(
        [sys.executable, path, "--quick"],
        cwd=FOLDER.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        return f"status {done.returncode}"
    try:
        last = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return "its last line is not JSON"
    return "" if isinstance(last, dict) else "its last line is no JSON object"


def main() -> int:
    failed = []
    for path in sorted(FOLDER.glob("[!_]*.py")):
        print(f"\n=== benchmarks/{path.name} --quick", flush=True)
        began = time.monotonic()
        problem = check(path)
        print(
            f"=== {time.monotonic() - began:.1f} s{': ' + problem if problem else ''}", flush=True
        )
        failed += [f"{path.name}: {problem}"] if problem else []
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
