"""Two hosts on one machine: network namespaces joined by a cable, each with its own counters.

    with two_hosts() as hosts:
        results = hosts.run(2, "tests.comm.test_account:measure")     # two ranks on each

Needs root and `ip` (iproute2); `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_CODE = """
import importlib, json, sys
import torch
from lezero.core import groups
torch.set_num_threads(1)
module, name = sys.argv[1].split(":")
groups.join(timeout_s=60, backend="gloo")
value = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
groups.leave()
print("RESULT" + json.dumps(value), flush=True)
"""


def missing() -> str:
    """What keeps this machine from having network namespaces; "" when nothing does."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs `ip` (iproute2)"
    name = f"lz-{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@dataclass(frozen=True)
class Hosts:
    names: tuple[str, str]

    def run(self, ranks: int, function: str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Calls `function` ("module:name") in `ranks` ranks of each host; results in rank order."""
        started = []
        with contextlib.ExitStack() as stack:
            for rank in range(2 * ranks):
                host = self.names[rank // ranks]
                log = stack.enter_context(tempfile.TemporaryFile("w+"))
                env = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % ranks),
                    "WORLD_SIZE": str(2 * ranks),
                    "MASTER_ADDR": "10.77.0.1",
                    "MASTER_PORT": "29511",
                    "GLOO_SOCKET_IFNAME": f"{host}-eth",
                    "OMP_NUM_THREADS": "1",
                }
                command = ["ip", "netns", "exec", host, sys.executable, "-c", _CODE]
                command += [function, json.dumps(args)]
                one = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log)
                stack.callback(_end, one)
                started.append((one, log))
            return [_result(one, log, timeout_s) for one, log in started]


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    mark = secrets.token_hex(3)
    names = (f"lz{mark}a", f"lz{mark}b")
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        cable = ("type", "veth", "peer", "name", f"{names[1]}-eth", "netns", names[1])
        _ip("link", "add", f"{names[0]}-eth", "netns", names[0], *cable)
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"{name}-eth")
            _ip("-n", name, "link", "set", f"{name}-eth", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names)
    finally:
        for name in made:
            _ip("netns", "del", name)


def bytes_out() -> int:
    """What this host has put on its cable so far, headers and all."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            return int(figures.split()[8])
    raise AssertionError("no such interface")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _result(process: subprocess.Popen[bytes], log: Any, timeout_s: float) -> Any:
    process.wait(timeout_s)
    log.seek(0)
    text = log.read()
    lines = [line for line in text.splitlines() if line.startswith("RESULT")]
    assert lines, text[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT"))
