"""Which ranks share a host: found, not configured.

Two ranks share a host when they run on one boot of one machine, see the same network (its
namespace) and can open each other's memory. Ranks in different network namespaces of one machine
count as two hosts, since what they say to each other goes through a network.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lezero.comm import shared_memory
from lezero.core import groups
from lezero.core.log import logger

_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Hosts:
    """Ranks by host: positions in their group, hosts in the order of their first rank."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def single(self) -> bool:
        """All ranks share one host."""
        return len(self.ranks) == 1

    @property
    def regular(self) -> bool:
        """Several hosts with the same number of ranks each, more than one, which are neighbours."""
        in_order = [rank for host in self.ranks for rank in host]
        sizes = {len(host) for host in self.ranks}
        return (
            len(self.ranks) > 1
            and in_order == sorted(in_order)
            and len(sizes) == 1
            and sizes.pop() > 1
        )


def find_hosts(group: torch.distributed.ProcessGroup) -> Hosts:
    """Finds the hosts of the ranks of `group`; all of them call it together.

    Ranks of one machine that cannot share memory count as hosts of their own; the log says so.
    """
    fd = -1
    token = secrets.token_bytes(_TOKEN_BYTES)
    able = shared_memory.available()
    try:
        if able:
            fd = shared_memory.create(_TOKEN_BYTES)
            os.pwrite(fd, token, 0)
        mine: dict[str, Any] = {"machine": _machine(), "pid": os.getpid(), "fd": fd}
        mine["token"] = token.hex()
        facts = groups.gather_objects(mine, group)
        opens = [able and _opens(fact) for fact in facts]
        table = groups.gather_objects(opens, group)
    finally:
        if fd >= 0:
            os.close(fd)
    return Hosts(_partition([fact["machine"] for fact in facts], table))


def _partition(machines: list[str], opens: list[list[bool]]) -> tuple[tuple[int, ...], ...]:
    hosts: list[list[int]] = []
    apart = False
    for rank, machine in enumerate(machines):
        for host in hosts:
            if machines[host[0]] != machine:
                continue
            if all(opens[rank][other] and opens[other][rank] for other in host):
                host.append(rank)
                break
            apart = True
        else:
            hosts.append([rank])
    if apart:
        logger("comm").info(
            "ranks of one machine cannot open each other's memory (another user, a process "
            "namespace, no compiler, a Python or a kernel without memfd_create or pidfd_open): "
            "they exchange through Gloo"
        )
    return tuple(map(tuple, hosts))


def _machine() -> str:
    """The same for processes that share a kernel and a network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"process {os.getpid()} {secrets.token_hex(8)}"


def _opens(fact: dict[str, Any]) -> bool:
    """Whether this process can open that one's memory; the token tells it from a namesake's."""
    if fact["fd"] < 0 or fact["machine"] != _machine():
        return False
    try:
        data = shared_memory.open_other(fact["pid"], fact["fd"], _TOKEN_BYTES)
    except (OSError, ValueError):
        return False
    return bytes(data.numpy()).hex() == fact["token"]
