"""Timing is kept short: what is measured is the business of a few tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def short_timing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, too: the models are so small that two threads mostly wait for each other, many
    times longer than the work takes where other tests have the cores."""
    import torch

    from lezero.compress.quantize import speed

    monkeypatch.setattr(speed, "_SECONDS", 0.0)
    monkeypatch.setattr(speed, "_ROUNDS", 2)
    monkeypatch.setattr(speed, "_MOST_RUNS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
