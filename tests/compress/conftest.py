"""Timing is kept short: what is measured is the business of a few tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lezero.compress.quantize import speed, verb

    monkeypatch.setattr(speed, "_SECONDS", 0.0)
    monkeypatch.setattr(speed, "_ROUNDS", 2)
    monkeypatch.setattr(verb, "_RUNS", 1)
