"""Ranks that end without leaving: what they have done counts."""

from __future__ import annotations

from pathlib import Path

from lezero.elastic import LaunchConfig, launch

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
