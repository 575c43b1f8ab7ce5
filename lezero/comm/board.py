"""Datagrams between the ranks: what a rank says is never held up by one that does not listen.

[Note: why datagrams]
A store has a server, and the server lives in some process: when that is the one that stopped,
everybody hangs. A datagram is sent or lost; no rank waits for another, none is special, and the
system itself answers for a process that is gone (its port refuses).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lezero.core import groups
from lezero.core.errors import DistributedError
from lezero.core.flags import flag

_LARGEST = 1 << 20
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


@dataclass(frozen=True)
class Address:
    """Where a rank listens. `machine` is equal for processes that can see each other."""

    host: str
    port: int
    machine: str
    pid: int
    token: str


class Board:
    """Sends to and receives from every other rank. Made by all ranks together."""

    def __init__(self) -> None:
        self.rank, self.world = groups.rank(), groups.world_size()
        self._family, master = _master()
        outward = _outward(self._family, master)
        alone = len(set(groups.gather_objects(_machine()))) == 1
        self._inbox = socket.socket(self._family, socket.SOCK_DGRAM)
        self._inbox.bind((_LOOPBACK[self._family] if alone else "", 0))
        port = self._inbox.getsockname()[1]
        mine = Address(outward, port, _machine(), os.getpid(), secrets.token_hex(8))
        told = groups.gather_objects(asdict(mine))
        self.addresses = [Address(**one) for one in told]
        self._token = bytes.fromhex(self.addresses[0].token)
        self._outbox = {r: self._connected(r, master) for r in range(self.world) if r != self.rank}
        self.gone: set[int] = set()

    def near(self, rank: int) -> bool:
        """True when `rank` is a process of this machine, which /proc knows."""
        return self.addresses[rank].machine == self.addresses[self.rank].machine

    def send(self, message: dict[str, Any], to: int | None = None) -> None:
        """Sends to one rank or to all; ranks whose port refuses are added to `gone`."""
        body = self._token + zlib.compress(json.dumps([self.rank, message]).encode(), 1)
        for rank, out in self._outbox.items():
            if to is None or rank == to:
                try:
                    out.send(body)
                except ConnectionRefusedError:  # the answer to an earlier datagram
                    self.gone.add(rank)
                except OSError:
                    continue  # no route or no room now: as good as lost

    def receive(self, timeout_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Waits for messages at most `timeout_s` and gives those that came, with their sender."""
        self._inbox.settimeout(max(0.0, timeout_s))  # select() takes no descriptor from 1024 on
        while True:
            try:
                body = self._inbox.recv(1 << 16)
            except (TimeoutError, BlockingIOError, ConnectionError):
                return
            self._inbox.settimeout(0.0)
            if body[: len(self._token)] != self._token:
                continue
            try:
                text = zlib.decompressobj().decompress(body[len(self._token) :], _LARGEST)
                rank, message = json.loads(text)
            except (zlib.error, ValueError, TypeError):
                continue
            if rank in self._outbox and isinstance(message, dict):
                yield rank, message

    def wake(self) -> None:
        """Ends the wait of a `receive` in another thread."""
        with socket.socket(self._family, socket.SOCK_DGRAM) as out:
            out.sendto(b"", (_LOOPBACK[self._family], self._inbox.getsockname()[1]))

    def close(self) -> None:
        for one in (self._inbox, *self._outbox.values()):
            one.close()

    def _connected(self, rank: int, master: str) -> socket.socket:
        address = self.addresses[rank]
        host = _LOOPBACK[self._family] if self.near(rank) else address.host
        if not self.near(rank) and _is_loopback(host):
            host = master  # a machine that takes its own name for loopback, as Debian does
        out = socket.socket(self._family, socket.SOCK_DGRAM)
        out.setblocking(False)
        out.connect((host, address.port))
        return out


def wanted() -> bool:
    """Whether the ranks watch each other: LEZERO_WATCH, which they have alike. Collective."""
    every: list[bool] = groups.gather_objects(bool(flag("LEZERO_WATCH")))
    if len(set(every)) > 1:
        on, off = every.index(True), every.index(False)
        raise DistributedError(
            f"LEZERO_WATCH is 0 on rank {off} but not on rank {on}: set it to 0 on every rank or "
            "on none"
        )
    return every[0]


def process_state(pid: int) -> str:
    """ "T" when a process of this machine is stopped, "" when it is gone or a zombie, "?" unknown.

    Other letters are the kernel's, proc_pid_stat(5).
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "" if os.path.exists("/proc/self/stat") else "?"
    except (OSError, IndexError):
        return "?"
    return "" if state in "ZX" else state


def _master() -> tuple[socket.AddressFamily, str]:
    """The family and number of the address where the ranks met."""
    name = os.environ.get("MASTER_ADDR") or _store_host() or "localhost"
    family, _, _, _, address = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0]
    return family, str(address[0])


def _store_host() -> str:
    """The host of the group's store, where the group was given an address of its own."""
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else ""


def _outward(family: socket.AddressFamily, master: str) -> str:
    """This machine's address on the network that leads to `master`."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def _machine() -> str:
    """Names the boot, network and process namespace that this process lives in."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    except OSError:
        return socket.gethostname()
    return " ".join([boot, *spaces])
