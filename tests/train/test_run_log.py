"""What a run says of its own memory."""

from __future__ import annotations

import sys

import pytest
import torch

from lezero.train.run_folder import RunFolder
from lezero.train.run_log import RunLog

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")


def blocks(count: int) -> list[torch.Tensor]:
    """Tensors of 64 KiB, which glibc keeps on its heap."""
    return [torch.ones(1 << 14) for _ in range(count)]


@pytest.mark.usefixtures("without_accelerator")
def test_what_was_freed_before_the_baseline_counts_when_it_is_used_again(tmp_path) -> None:
    garbage = blocks(1024)
    last = torch.ones(1 << 14)  # on top of the heap: what lies below stays with the process
    del garbage
    log = RunLog(RunFolder(tmp_path / "run"))
    log.measure_from_here()
    held = blocks(512)
    assert 28 << 20 < log._step_peak() < 48 << 20
    del held, last
