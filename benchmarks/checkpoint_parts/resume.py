"""Bitwise resume: a run that was killed and resumed against one that was not."""

from __future__ import annotations


def resume(quick: bool) -> tuple[bool | None, int]:
    """(every case bitwise equal, cases). None until the training engine is there to be killed."""
    return None, 0
