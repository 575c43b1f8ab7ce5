"""Numbers that are not finite in JSON, which has none: `{"$float": "inf"}`, "-inf" or "nan"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_KEY = "$float"
_VALUES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def written(value: Any) -> Any:
    """`value` with such an object for each number that is not finite. An object of the caller's own
    that has this key alone is wrapped, so that `read` gives it back."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_KEY: str(float(value))}
    if isinstance(value, Mapping) and set(value) == {_KEY}:
        return {_KEY: {_KEY: written(value[_KEY])}}
    return _inside(value, written)


def read(value: Any) -> Any:
    """What `written` was given; tuples are lists."""
    if isinstance(value, dict) and set(value) == {_KEY}:
        inner = value[_KEY]
        if isinstance(inner, str) and inner in _VALUES:
            return _VALUES[inner]
        wrapped = isinstance(inner, dict) and set(inner) == {_KEY}
        return {_KEY: read(inner[_KEY])} if wrapped else value
    return _inside(value, read)


def _inside(value: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: of(item) for key, item in value.items()}
    return [of(item) for item in value] if isinstance(value, list | tuple) else value
