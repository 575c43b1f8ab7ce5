"""The connections that process groups hold, so that a wait in one of them can be ended.

[Note: how a wait ends]
Gloo waits in C++ until its peer sends or the timeout comes, and torch's `abort` and `shutdown` do
nothing to it (tried with torch 2.13). Shutting its sockets down does: the wait ends at once with
"Connection closed by peer", as if the other side had gone. So the sockets that appear while a group
is made are noted.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_noted: set[str] = set()


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Notes the sockets that appear in this process inside the block."""
    before = {name for _, name in _open()}
    try:
        yield
    finally:
        _noted.update(name for _, name in _open() if name not in before)


def shut() -> int:
    """Shuts down every noted connection, or all there are when none was; returns how many."""
    count = 0
    for fd, name in _open():
        if _noted and name not in _noted:
            continue
        # A second descriptor: the first belongs to the backend, which will close it.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.type == socket.SOCK_STREAM and copy.family != socket.AF_UNIX:
                copy.getpeername()  # Gloo ends the process when its listening socket is shut
                copy.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connected_to(port: int) -> bool:
    """Whether this process has a connection to `port`, of any machine."""
    for fd, _ in _open():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            stream = copy.type == socket.SOCK_STREAM and copy.family != socket.AF_UNIX
            if stream and copy.getpeername()[1] == port:
                return True
    return False


def forget() -> None:
    """The groups are gone, and their connections with them."""
    _noted.clear()


def _open() -> list[tuple[int, str]]:
    """(descriptor, "socket:[inode]") of this process's sockets; empty where /proc is not."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found.append((int(name), target))
    return found
