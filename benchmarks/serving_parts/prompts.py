"""Prompts that every side can make, the same ones everywhere."""

from __future__ import annotations

import random


def random_tokens(vocab: int, count: int, seed: int) -> list[int]:
    """Tokens without the first ten of the vocabulary, which are often special."""
    drawn = random.Random(seed)
    return [drawn.randrange(10, vocab) for _ in range(count)]
