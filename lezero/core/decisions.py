"""What LeZero chose by itself: candidates → measure → choose → record → broadcast → replay.

Rank 0 measures each candidate, the smallest figure wins, every rank learns the result, and the
record with all figures goes into the run's `decisions.json` and the checkpoint. A resumed run
replays its records instead of measuring again, so that it computes as it did before. A user's own
word (`override`) always wins and is recorded as such.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lezero.core import groups
from lezero.core.errors import ConfigError, FileError

FORMAT = 1


@dataclass(frozen=True)
class Decision:
    """One choice. `candidates` maps each name to its figures; None means that it failed."""

    topic: str
    chosen: str
    candidates: Mapping[str, Mapping[str, float | str | None]]
    unit: str
    reason: str
    overridden: bool = False
    replayed: bool = False
    step: int = 0


@dataclass
class Decisions:
    """The record of one run. Pass the one object to everything that chooses."""

    records: dict[str, Decision] = field(default_factory=dict)
    replay: dict[str, Decision] = field(default_factory=dict)

    def choose(
        self,
        topic: str,
        candidates: Mapping[str, Callable[[], float]],
        *,
        override: str | None = None,
        unit: str = "s",
        why: str = "",
        keep: str | None = None,
        margin: float = 0.0,
        step: int = 0,
    ) -> str:
        """The name of the candidate whose measured figure is smallest, the same on every rank.

        Only rank 0 measures: a candidate must not communicate. One that raises is recorded as
        failed and never chosen. `keep` names the candidate that means "do nothing"; another must
        beat it by the fraction `margin`. Raises `ConfigError` when `override` is no candidate or
        when every candidate fails; where doing nothing fails too, rank 0 raises that failure, since
        it is no matter of the choice. A rank of several that has not joined them measures nothing:
        `OrderError`.
        """
        if override is not None:
            if override not in candidates:
                raise ConfigError(
                    f"{topic}: got '{override}', allowed is {', '.join(candidates)} or auto"
                )
            reason = "asked for"
            return self._keep(Decision(topic, override, {}, unit, reason, True, step=step))
        old = self.replay.get(topic)
        if old is not None and old.chosen in candidates:
            return self._keep(Decision(**{**asdict(old), "replayed": True}))
        groups.need_joined()
        made: Any = None
        failures: dict[str, Exception] = {}
        if groups.is_main():
            made = asdict(_measured(topic, candidates, unit, why, keep, margin, step, failures))
        made = groups.broadcast_object(made)
        if not made["chosen"]:
            if keep in failures:
                raise failures[keep]
            raise ConfigError(f"{topic}: no candidate works on this machine: {made['reason']}")
        return self._keep(Decision(**made))

    def record(
        self,
        topic: str,
        chosen: str,
        candidates: Mapping[str, Mapping[str, float | str | None]] | None = None,
        reason: str = "",
        *,
        unit: str = "",
        overridden: bool = False,
        fact: bool = False,
        step: int = 0,
    ) -> str:
        """Records a choice that follows from facts and needed no measurement; rank 0's is kept.

        fact: it is so here and now, whatever a resumed run had before, and is not replayed.
        """
        old = self.replay.get(topic)
        if old is not None and not overridden and not fact:
            return self._keep(Decision(**{**asdict(old), "replayed": True}))
        made = Decision(topic, chosen, candidates or {}, unit, reason, overridden, step=step)
        return self._keep(Decision(**groups.broadcast_object(asdict(made))))

    def _keep(self, decision: Decision) -> str:
        self.records[decision.topic] = decision
        return decision.chosen

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "decisions": [asdict(d) for d in self.records.values()]}

    @classmethod
    def from_json(cls, data: Any) -> Decisions:
        """A record that replays what `data` says; `FileError` when it is no decisions record."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise FileError(f"decisions of format {found!r}; this version reads format {FORMAT}")
        try:
            old = {item["topic"]: Decision(**item) for item in data["decisions"]}
        except (TypeError, KeyError) as error:
            raise FileError(f"decisions record is damaged: {error}") from None
        return cls(replay=old)

    def write(self, path: Path) -> None:
        """Writes `decisions.json` (aside, then renamed)."""
        aside = path.with_name(path.name + ".tmp")
        aside.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(aside, path)


def _measured(
    topic: str,
    candidates: Mapping[str, Callable[[], float]],
    unit: str,
    why: str,
    keep: str | None,
    margin: float,
    step: int,
    failures: dict[str, Exception],
) -> Decision:
    figures: dict[str, dict[str, float | str | None]] = {}
    for name, measure in candidates.items():
        try:
            figures[name] = {unit: float(measure())}
        except Exception as error:  # a candidate that cannot run is a loser, not a crash
            failures[name] = error
            said = str(error).strip() or type(error).__name__
            figures[name] = {unit: None, "failed": said.splitlines()[0][:200]}
    works = {n: f[unit] for n, f in figures.items() if isinstance(f[unit], float)}
    if not works:
        failed = "; ".join(f"{n}: {f.get('failed')}" for n, f in figures.items())
        return Decision(topic, "", figures, unit, failed, step=step)
    best = min(works, key=lambda name: works[name])  # type: ignore[arg-type,return-value]
    reason = why or "the smallest figure measured"
    if keep in works and best != keep and works[best] > (1 - margin) * works[keep]:  # type: ignore[operator]
        best, reason = keep, f"nothing beats '{keep}' by {margin:.0%}{why and f'; {why}'}"
    return Decision(topic, best, figures, unit, reason, step=step)
