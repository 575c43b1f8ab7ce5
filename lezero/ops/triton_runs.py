"""Whether Triton's kernels run here."""

from __future__ import annotations

import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor

import torch

from lezero.core import device
from lezero.core.log import logger


def triton_runs(place: torch.device) -> bool:
    """Whether Triton's kernels run on this device: a small one is compiled, once a process.

    Triton needs a C compiler and Python's headers. Where these are missing, one line of the log
    says so, and what asked does the same in plain PyTorch.
    """
    return place.type == "cuda" and _compiles(place)


@functools.cache
def _compiles(place: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        # Modes of torch (fake tensors, a default device) are per thread; this one has none.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_try_out, place).result()
    except Exception as error:  # of the compiler's, the driver's or Triton's own kinds
        logger("ops").warning(
            "Triton does not compile on %s (%s: %s): kernels run as plain PyTorch, slower; it "
            "needs a C compiler and Python's headers (python3-dev)",
            place,
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return False
    return True


def _try_out(place: torch.device) -> None:
    from lezero.ops import triton_units

    with device.using(place):
        triton_units.try_out(place)
        torch.accelerator.synchronize(place)
