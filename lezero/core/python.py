"""Python processes that this one starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])


def same_imports() -> dict[str, str]:
    """The environment of a Python that imports what this one does, and nothing that happens to lie
    in the working folder, as that of a model."""
    path = [x for x in sys.path if x and isinstance(x, str)]  # Python passes over others
    path += [] if _ROOT in path else [_ROOT]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
