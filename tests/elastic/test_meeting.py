"""Launchers of several machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lezero.elastic import LaunchConfig

GROWING = """
import os, sys
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
DynamicRendezvousHandler.num_nodes_waiting = lambda self: int(os.path.exists(sys.argv[2]))
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
    job = {
        **LaunchConfig(ranks=1, quiet=True).to_dict(),
        **{"nodes": [1, 1], "endpoint": "localhost:0", "id": "growing", "parent": os.getpid()},
        "command": ["script", str(script)],
    }
    words = [sys.executable, "-c", GROWING, json.dumps(job), str(tmp_path / "ready")]
    agent = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
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
