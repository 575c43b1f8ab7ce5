"""Two ranks on two hosts made of one machine, or on one host, for benchmarks of wires.

Two network namespaces are joined by a veth pair; `tc` limits what each end sends (tbf, which every
kernel with traffic control has). Needs root, `ip` and `tc`; `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

BURST = {"100mbit": "64kb", "1gbit": "256kb"}


def missing() -> str:
    """What keeps this machine from having two hosts; "" when nothing does."""
    if os.geteuid() != 0:
        return "two hosts need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"two hosts need `{command}` (iproute2)"
    try:
        with two_hosts("100mbit"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` does not work here"


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[tuple[str, str]]:
    """The names of two network namespaces; each end of their cable sends at `rate`."""
    mark = secrets.token_hex(3)
    names = (f"lz{mark}a", f"lz{mark}b")
    made = []
    try:
        for name in names:
            _call("ip", "netns", "add", name)
            made.append(name)
        cable = ("type", "veth", "peer", "name", f"{names[1]}-eth", "netns", names[1])
        _call("ip", "link", "add", f"{names[0]}-eth", "netns", names[0], *cable)
        for number, name in enumerate(names, 1):
            link = f"{name}-eth"
            _call("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            _call("ip", "-n", name, "link", "set", link, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")
            limit = ("rate", rate, "burst", BURST[rate], "latency", "50ms")
            _call("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *limit)
        yield names
    finally:
        for name in made:
            _call("ip", "netns", "del", name)


def run_ranks(command: Sequence[str], rate: str, timeout_s: float) -> list[dict[str, Any]]:
    """Runs `command` as two ranks, on two hosts at `rate` ("" for one host, over its loopback).

    Returns the JSON objects that they print last; `RuntimeError` with the end of what a failed rank
    said.
    """
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(rate)) if rate else ()
        started = []
        port = _free_port()
        for rank in range(2):
            env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            env["GLOO_SOCKET_IFNAME"] = f"{hosts[rank]}-eth" if hosts else "lo"
            env["MASTER_ADDR"] = "10.77.0.1" if hosts else "127.0.0.1"
            inside = ["ip", "netns", "exec", hosts[rank]] if hosts else []
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            one = subprocess.Popen([*inside, *command], env=env, stdout=log, stderr=log)
            stack.callback(_end, one)
            started.append((one, log))
        end = time.monotonic() + timeout_s
        while any(one.poll() is None for one, _ in started):
            if any(one.poll() for one, _ in started):
                break  # the other one may wait for it
            if time.monotonic() > end:
                raise RuntimeError(f"the ranks did not end in {timeout_s:g} s")
            time.sleep(0.05)
        started.sort(key=lambda pair: not pair[0].poll())  # the one that failed first
        return [_result(one, log) for one, log in started]


def _result(process: subprocess.Popen[bytes], log: Any) -> dict[str, Any]:
    status = process.wait()
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()] or ["no message"]
    if status:
        raise RuntimeError(f"a rank ended with status {status}: " + " / ".join(lines[-6:]))
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
