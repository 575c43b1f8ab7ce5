"""The decisions of a run as they are shown, from the plain data of `decisions.json`.

{"format": 1, "decisions": [{"topic": "compile", "chosen": "eager", "unit": "s",
 "candidates": {"eager": {"s": 1.2}, "blocks": {"s": null, "failed": "no compiler"}},
 "reason": "…", "overridden": false, "replayed": false, "step": 0}]}
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lezero.core.errors import ConfigError, FileError
from lezero.core.paths import expand_home, read_regular
from lezero.report import units
from lezero.report.markup import plain

FORMAT = 1
FILE = "decisions.json"
_LIMIT = 16 << 20


@dataclass(frozen=True)
class Candidate:
    """One candidate: `value` in the unit of its decision (None: there is none), then the rest."""

    name: str
    value: float | None
    rest: str


@dataclass(frozen=True)
class Shown:
    """One decision, every text printable."""

    topic: str
    chosen: str
    reason: str
    unit: str
    candidates: Sequence[Candidate]
    marks: Sequence[str]

    def figure(self, candidate: Candidate) -> str:
        """The value of a candidate as people read it."""
        if candidate.value is None:
            return ""
        words = self.unit.split()
        if "s" in words or "seconds" in words:
            return units.span(candidate.value)
        if "bytes" in words:
            return units.size(candidate.value)
        return units.number(candidate.value)

    @property
    def heading(self) -> str:
        """The unit in words."""
        return {"s": "seconds"}.get(self.unit, self.unit)

    def times(self, candidate: Candidate) -> str:
        """How far a candidate is from the chosen one: `1.25×`."""
        chosen = next((c.value for c in self.candidates if c.name == self.chosen), None)
        if candidate.value is None or not chosen or candidate.name == self.chosen:
            return ""
        ratio = candidate.value / chosen
        return f"{ratio:.2f}x" if 0 < ratio < 1000 else ""


def read_decisions(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The document of a run folder, or of the file itself.

    Raises `FileError` when there is none, or none that this version reads.
    """
    path = Path(expand_home(run))
    try:
        if not path.exists():
            raise FileError(f"{path}: no such run folder")
        if path.is_dir():
            path = path / FILE
        data = json.loads(read_regular(path, _LIMIT))
    except FileError:
        raise
    except FileNotFoundError:
        raise FileError(
            f"{path.parent}: there is no {FILE} in it; a run writes it when it starts. "
            "Name the folder of a run"
        ) from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid JSON ({error})") from None
    check(data, str(path))
    return dict(data)


def check(data: object, source: str) -> None:
    """Raises `FileError` unless `data` is a decisions document of a format known here."""
    if not isinstance(data, Mapping) or not isinstance(data.get("decisions"), list):
        raise FileError(f"{source}: no record of decisions")
    if data.get("format") != FORMAT:
        raise FileError(
            f"{source}: format {data.get('format')!r}; this version reads format {FORMAT}"
        )


def pick(data: Mapping[str, Any], topic: str | None) -> list[dict[str, Any]]:
    """The records of a checked document; those of one topic (or the start of its name) if given.

    Raises `ConfigError` that names the nearest topic when there is none like it.
    """
    records = [item for item in data["decisions"] if isinstance(item, Mapping)]
    if topic is None:
        return [dict(item) for item in records]
    asked = topic.casefold()
    exact = [r for r in records if str(r.get("topic")).casefold() == asked]
    found = exact or [r for r in records if str(r.get("topic")).casefold().startswith(asked)]
    if found:
        return [dict(item) for item in found]
    topics = [plain(r.get("topic")) for r in records]
    if not topics:
        raise ConfigError(f"there is no decision '{plain(topic)}': this run recorded none")
    near = difflib.get_close_matches(topic, topics, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(topics)}"
    raise ConfigError(f"there is no decision '{plain(topic)}'; {hint}")


def shown(record: Mapping[str, Any]) -> Shown:
    """One record made printable; what is missing or odd in it is left out."""
    unit = _text(record.get("unit"))
    given = record.get("candidates")
    made = [
        _candidate(_text(name), figures, unit)
        for name, figures in (given.items() if isinstance(given, Mapping) else ())
    ]
    step = record.get("step")
    marks = [
        *(["asked for"] if record.get("overridden") is True else []),
        *(["kept from before a resume"] if record.get("replayed") is True else []),
        *([f"at step {step:,}"] if isinstance(step, int) and step > 0 else []),
    ]
    reason = _text(record.get("reason"))
    if marks[:1] == [reason]:
        reason = ""
    return Shown(
        _text(record.get("topic")),
        _text(record.get("chosen")),
        reason,
        unit,
        made,
        marks,
    )


def _candidate(name: str, figures: object, unit: str) -> Candidate:
    if not isinstance(figures, Mapping):
        return Candidate(name, _real(figures), "")
    value = _real(figures.get(unit))
    rest = [
        _text(item) if key in ("failed", "note") else f"{_text(key)} {_said(item)}"
        for key, item in figures.items()
        if key != unit and item is not None
    ]
    return Candidate(name, value, ", ".join(rest))


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _said(value: object) -> str:
    real = _real(value)
    return units.number(real) if real is not None else _text(value)


def _text(value: object) -> str:
    return "" if value is None else " ".join(plain(value).split())
