"""How many connections the system lets this process have open at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

_SPARE = 64
"""Files for all else: models, logs, records."""


@contextlib.contextmanager
def room_for_connections(wanted: int) -> Iterator[int]:
    """Raises this process's own limit of open files where it must, and gives how many connections
    it may have: fewer than wanted where the system allows no more. In the end it is as before.

    Each counts twice: as many more may come at once, before those that are too many are told so.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield wanted
        return
    beside = psutil.Process().num_fds() + _SPARE
    needed = 2 * wanted + beside
    limit = max(soft, needed if hard == resource.RLIM_INFINITY else min(needed, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield max(1, min(wanted, (limit - beside) // 2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
