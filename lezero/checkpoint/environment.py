"""What a bitwise resume depends on besides the checkpoint: recorded, and compared on resume."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WORDS = {
    "torch": "torch",
    "machine": "processor type",
    "cpu": "processor",
    "instructions": "vector instructions",
    "accelerator": "accelerator",
    "world_size": "number of ranks",
    "threads": "threads per rank",
}


def environment() -> dict[str, Any]:
    """A JSON record of this machine, torch, world size and thread count."""
    import torch

    from lezero import __version__
    from lezero.core import groups
    from lezero.core.device import accelerator

    kind = accelerator()
    return {
        "lezero": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": _cpu(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.get_device_module(kind).get_device_name() if kind else None,
        "world_size": groups.world_size(),
        "threads": torch.get_num_threads(),
    }


def environment_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each thing that differs and that bits depend on, as a phrase; empty when none does.

    A run that resumes with differences is right, but its numbers are not promised to be bitwise
    those of a run that was never interrupted.
    """
    return [
        f"{word}: {saved.get(key)} when saved, {now.get(key)} now"
        for key, word in _WORDS.items()
        if saved.get(key) != now.get(key)
    ]


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
