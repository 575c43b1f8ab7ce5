"""Launchers of several machines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousTimeoutError,
    c10d_rendezvous_backend,
)

from lezero.elastic import LaunchConfig
from lezero.elastic.agent import _fail, _meeting

GROWING = """
import os, sys
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
DynamicRendezvousHandler.num_nodes_waiting = lambda self: int(os.path.exists(sys.argv[2]))
from lezero.elastic.agent import main
main()
"""
ALONE = """
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
c10d_rendezvous_backend._matches_machine_hostname = lambda host: False
from lezero.elastic.agent import main
main()
"""
RANK = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(__file__).parent
def save(*_):
    if (folder / "stopping").exists():
        (folder / "saved").touch()
        sys.exit(0)
    (folder / "stopping").touch()
signal.signal(signal.SIGTERM, save)
(folder / "ready").touch()
if os.environ["LEZERO_STARTS"] != "0":
    (folder / "again").touch()
for _ in range(600):
    time.sleep(0.1)
"""


def test_a_signal_while_a_machine_joins_ends_the_job(tmp_path: Path) -> None:
    """It only shortened the wait for the ranks, and the job started again."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    growing = {
        **LaunchConfig(ranks=1, quiet=True).to_dict(),
        **{"nodes": [1, 1], "endpoint": "localhost:0", "id": "growing", "parent": os.getpid()},
        "command": ["script", str(script)],
    }
    command = [sys.executable, "-c", GROWING, json.dumps(growing), str(tmp_path / "ready")]
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    try:
        while not (tmp_path / "stopping").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        agent.terminate()
        _, said = agent.communicate(timeout=30)
    finally:
        agent.kill()
    assert agent.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "again").exists()
    first, second = said.splitlines()
    assert first.startswith("lezero: machines come or go: the ranks have 30 s to save")
    assert second.startswith("lezero: stopping")


def job(port: int, seconds: int) -> dict[str, Any]:
    config = LaunchConfig(nodes="2", address="localhost", port=port, join_timeout_s=seconds)
    return {**config.to_dict(), "nodes": [2, 2], "endpoint": f"localhost:{port}", "id": "apart"}


def test_launchers_wait_for_each_other_as_long_as_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every one waited 60 s for the first to come, and 600 s for the last."""
    monkeypatch.setattr(
        c10d_rendezvous_backend,
        "_matches_machine_hostname",
        lambda host: threading.current_thread() is threading.main_thread(),
    )
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(1) as elsewhere:
        with pytest.raises(RendezvousConnectionError):
            elsewhere.submit(_meeting, job(port, 1)).result(30)
        coming = elsewhere.submit(_meeting, job(port, 50))
        time.sleep(0.5)
        first = _meeting(job(port, 1))
        second = coming.result(30)
    assert second._store.timeout == timedelta(seconds=60)  # type: ignore[attr-defined]
    with pytest.raises(RendezvousTimeoutError) as late:
        first.next_rendezvous()
    assert _fail({**job(port, 1), "debug": False}, late.value) == 1
    assert f"localhost:{port}: within the 1 s of --join-timeout" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_first_machine_is_waited_for_ends_the_launcher(number: int) -> None:
    """Torch heard it when it gave up, after twenty minutes."""
    with socket.create_server(("localhost", 0)) as silent:
        silent.settimeout(60)
        alone = {**job(silent.getsockname()[1], 600), "parent": os.getpid()}
        agent = subprocess.Popen([sys.executable, "-c", ALONE, json.dumps(alone)])
        try:
            with silent.accept()[0]:
                agent.send_signal(number)
                assert agent.wait(30) == -number
        finally:
            agent.kill()


def test_a_signal_while_other_machines_are_waited_for_leaves_nothing(tmp_path: Path) -> None:
    alone = {**job(1, 600), "endpoint": "localhost:0", "parent": os.getpid()}
    command = [sys.executable, "-c", "from lezero.elastic.agent import main; main()"]
    where = {**os.environ, "TMPDIR": str(tmp_path)}
    agent = subprocess.Popen([*command, json.dumps(alone)], env=where)
    end = time.monotonic() + 60
    try:
        while not list(tmp_path.glob("lezero-launch-*/*")):
            assert time.monotonic() < end
            time.sleep(0.02)
        agent.terminate()
        assert agent.wait(30) == 128 + signal.SIGTERM
    finally:
        agent.kill()
    assert not list(tmp_path.iterdir())
