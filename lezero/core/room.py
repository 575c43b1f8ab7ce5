"""Memory that this process may still take."""

from __future__ import annotations

from lezero.core import facts
from lezero.core.cgroup import read_text


def free_memory(sharing: int = 1) -> int:
    """Bytes of host memory that this process may still take; 0 when that is unknown.

    What is free on the machine is for `sharing` processes alike; a limit on addresses
    (`ulimit -v`, as batch systems set it) is this process's own.
    """
    found = facts.memory()
    free = (min(found.available, found.limit) if found.limit else found.available) // sharing
    room = address_room()
    return free if room is None else min(free, room) if free else room


def address_room() -> int | None:
    """Bytes of addresses that `ulimit -v` leaves this process; None without such a limit. Libraries
    and threads take addresses that are no memory, so memory runs out with it or before."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return None
        pages = int(read_text(facts.ROOT / "proc/self/statm").split()[0])
        return max(1, limit - pages * resource.getpagesize())
    except (ImportError, OSError, ValueError, IndexError):
        return None
