"""Ranks that end: without leaving, and while the agent looks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lezero.elastic import LaunchConfig, launch
from lezero.elastic.agent import Agent

SUMS = """
import sys
import torch
from lezero.comm import Link, Mesh, Wire
from lezero.core import groups
groups.join()
link = Link(Wire(codec="int4", feedback="both"), Mesh({"shard": 4}), "shard")
sys.setswitchinterval(60)  # nobody takes the interpreter's lock who is not given it
for _ in range(5):
    link.all_reduce(torch.ones(4000), key="a").wait()
"""


def test_a_rank_that_ends_at_once_is_not_aborted(tmp_path: Path) -> None:
    """Three of four runs failed with SIGABRT, in a thread of Gloo that dropped a tensor."""
    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    assert launch(LaunchConfig(ranks=4, oversubscribe=True, quiet=True), [str(script)]) == 0


def test_a_rank_that_fails_while_the_agent_looks_is_for_its_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch saw the failure first and started all ranks again: not told, and not counted."""
    codes = iter([None, 0, -9])  # of one process: it runs, and then was killed
    process = SimpleNamespace(proc=SimpleNamespace(poll=lambda: next(codes)))
    agent = object.__new__(Agent)
    monkeypatch.setattr(agent, "_handlers", lambda: {0: process}, raising=False)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: pytest.fail("torch's"))
    assert agent._monitor_workers(None).state is WorkerState.HEALTHY


def test_a_first_rank_that_is_slow_to_end_tells_the_common_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import atexit, os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(time.sleep, 20)\n"
        "print('error: no such file', file=sys.stderr)\nsys.exit(2)\n"
    )
    config = LaunchConfig(ranks=2, oversubscribe=True, quiet=True)
    assert launch(config, [str(script)]) == 2
    assert capfd.readouterr().err == "error: no such file\n"
