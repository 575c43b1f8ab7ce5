"""Names that are twice in a JSON object, of which Python's reader takes the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def name_twice(pairs: Sequence[tuple[str, Any]]) -> str | None:
    """A name that several of the pairs have; None where each has its own."""
    if len(dict(pairs)) == len(pairs):
        return None
    return Counter(name for name, _ in pairs).most_common(1)[0][0]
