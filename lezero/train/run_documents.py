"""A run's folder as a report reads it: each document, or why it is not there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError, LeZeroError
from lezero.core.paths import expand_home, read_regular
from lezero.train.metrics import Metrics, read_metrics

KNOWN = (
    "config.yaml",
    "metrics.jsonl",
    "decisions.json",
    "forecast.json",
    "hardware.json",
    "sample.json",
    "verify.json",
)
_MOST_BYTES = 16 << 20


@dataclass
class RunDocuments:
    """What a run folder holds. A document that is missing or unreadable is None (metrics: empty)
    and `missing` says why, by file name."""

    folder: Path
    missing: dict[str, str] = field(default_factory=dict)
    config: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    decisions: Any = None
    forecast: Any = None
    hardware: Any = None
    sample: Any = None
    verify: Any = None

    @classmethod
    def read(cls, folder: str | Path) -> RunDocuments:
        """Reads a run folder. Raises `FileError` when it is no folder or holds nothing of a run."""
        path = Path(expand_home(folder))
        if not path.exists():
            raise FileError(f"{path}: no such run folder")
        if not path.is_dir():
            raise FileError(f"{path}: is a file; name the folder of a run")
        if not any((path / name).exists() for name in KNOWN):
            raise FileError(f"{path}: no run folder (it holds none of {', '.join(KNOWN[:3])})")
        made = cls(path)
        made.config = made._text("config.yaml")
        try:
            if (path / "metrics.jsonl").exists():
                made.metrics = read_metrics(path / "metrics.jsonl")
            else:
                made.missing["metrics.jsonl"] = "not there"
        except LeZeroError as error:
            made.missing["metrics.jsonl"] = str(error)
        for name in ("decisions", "forecast", "hardware", "sample", "verify"):
            setattr(made, name, made._json(f"{name}.json"))
        return made

    def say(self, name: str) -> str:
        """The sentence for a document that cannot be shown."""
        why = self.missing.get(name, "not in the form that this version knows")
        return f"{name}: {why}."

    def _text(self, name: str) -> str | None:
        path = self.folder / name
        try:
            return read_regular(path, _MOST_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            self.missing[name] = "not there"
        except FileError as error:
            self.missing[name] = str(error)
        except OSError as error:
            self.missing[name] = f"cannot be read ({error.strerror})"
        return None

    def _json(self, name: str) -> Any:
        text = self._text(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self.missing[name] = f"not valid JSON ({error})"
            return None


def real(data: object, *path: str) -> float | None:
    """The finite number at `path` inside nested mappings; None when there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    if isinstance(data, bool) or not isinstance(data, int | float):
        return None
    return float(data) if math.isfinite(data) else None


def mapping(data: object, *path: str) -> Mapping[str, Any]:
    """The mapping at `path`; an empty one when there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, Mapping) else {}
