"""Randomness inside a step comes from (seed, step, micro-batch), not from a rank's generator.

So dropout is the same on one rank of four micro-batches and on two ranks of two, and a resumed run
needs no saved generator to repeat it. The caller's own generators are put back afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch

from lezero.core import device


@contextlib.contextmanager
def seeded(seed: int, step: int, micro: int) -> Iterator[None]:
    """Seeds torch's generators for one micro-batch; restores them on leaving."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro}".encode(), digest_size=8).digest()
    with device.kept_generators(torch.device(device.accelerator() or "cpu")):
        device.seed(int.from_bytes(digest, "little") >> 1)
        yield
