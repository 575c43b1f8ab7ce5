"""What was made before a fork and is used after it, where threads did not come along."""

from __future__ import annotations

import os

import torch

from lezero.core.errors import OrderError


def need_threads_of(process: int, what: str) -> None:
    """`OrderError` in a fork of the process that made `what`: a fork has none of the threads that
    kernels there share their work with, and would wait for them forever. One thread needs none."""
    if os.getpid() != process and torch.get_num_threads() > 1:
        raise OrderError(
            f"{what} was made by process {process}, of which this one ({os.getpid()}) is a fork, "
            "without its threads: it would wait for them forever. Make it in the process that "
            "uses it, start processes by 'spawn', or call torch.set_num_threads(1) in it"
        )
