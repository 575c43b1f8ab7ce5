"""How long a codec takes, where it works."""

from __future__ import annotations

import time

import torch

from lezero.comm.choice import Speed
from lezero.comm.codec import codec


def codec_speed(name: str, device: torch.device) -> Speed:
    """Times a codec on `device`, with feedback: the best of three, so no first use counts.

    An accelerator gets as many elements as an exchange has there: of fewer it is the launch that is
    timed.
    """
    timed = 1 << (20 if device.type == "cpu" else 22)
    one = codec(name)
    values = torch.randn(timed, dtype=torch.float32, device=device)
    error, out = torch.zeros_like(values), torch.zeros_like(values)
    payload = torch.empty(one.bytes(timed), dtype=torch.uint8, device=device)
    turns = []
    for _ in range(3):
        _settle(device)
        began = time.perf_counter()
        one.encode(values, payload, error)
        _settle(device)
        middle = time.perf_counter()
        one.decode(payload, out, add=True)
        _settle(device)
        turns.append((middle - began, time.perf_counter() - middle))
    return Speed(*(min(turn[side] for turn in turns) / timed for side in (0, 1)))


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
