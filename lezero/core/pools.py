"""The threads that OpenMP keeps for each thread of the program.

[Note: pools that stay]
torch computes with OpenMP, which keeps a pool for every thread that ever asked it to. Where pools
together have more threads than there are cores, GNU's lets each of them sleep at every end of a
parallel region in place of waiting awake: on two cores a step of a small encoder took 2.5 times as
long in a server's thread once the main thread had measured the model.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_SOFT = 1  # omp_pause_soft
_MAPS = Path("/proc/self/maps")


def release_pool() -> None:
    """Ends the calling thread's pool, which is made again when it computes again: for a thread that
    hands its work over to another one. Does nothing where OpenMP is not found (not on Linux)."""
    for path in _libraries():
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:  # OpenMP 5.0
            pause(_SOFT)


def _libraries() -> set[str]:
    """OpenMP's, of those that are loaded."""
    if not _MAPS.exists():
        return set()
    loaded = {line.partition("/")[2] for line in _MAPS.read_text().splitlines()}
    return {
        f"/{path}"
        for path in loaded
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))
        and Path(f"/{path}").exists()
    }
