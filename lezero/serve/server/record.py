"""What a server chose by itself, kept where `lz why` reads it.

A folder of the user's, or one in the cache folder for each model as its files are now. Choices that
change numbers (an encoder's weights) are taken again from there at the next start of the same
model, so that a server gives the same answers after it was started anew; the plan of batches
follows the machine, and is found each time. What somebody asked for holds for that start alone.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from lezero.core.decisions import Decisions
from lezero.core.facts import cache_folder
from lezero.core.log import logger
from lezero.report.decisions import FILE, read_decisions
from lezero.serve.batching.plan import Plan, Tried
from lezero.serve.llm import LLM
from lezero.serve.threads import Placement

_LOG = logger("serve")
_FOLLOWS, _MODEL = "batching", "model"
_UNIT = "requests/s"
_ANYWHERE, _OWN = "wherever the system puts them", "a core each"


class Record:
    """The decisions of one server, in `folder`. Raises `FileError` for a file that is damaged.

    model: whose decisions they are; those of another model are not taken again.
    """

    def __init__(self, folder: str | Path, model: str = "") -> None:
        self.folder = Path(folder)
        self.decisions = Decisions()
        if os.path.exists(self.folder / FILE):  # Path.exists raises for a folder of others'
            old = Decisions.from_json(read_decisions(self.folder)).replay
            known = old[_MODEL].chosen if _MODEL in old else ""
            if known == model:
                made = {t: d for t, d in old.items() if t != _FOLLOWS and not d.overridden}
                self.decisions.replay = made
        if model:
            self.decisions.record(_MODEL, model, reason="its files as they are now", fact=True)

    def write(self) -> None:
        """Writes the file; a folder that cannot be written is told, and serving goes on.

        What was measured at an earlier start stays where this one was asked for something else.
        """
        made, measured = self.decisions.records, self.decisions.replay
        kept = {t: measured.get(t, d) if d.overridden else d for t, d in made.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            Decisions(kept).write(self.folder / FILE)
        except OSError as error:
            _LOG.warning("decisions are not kept: %s cannot be written (%s)", self.folder, error)

    def take_engine(self, llm: LLM, *, weights: str, kv: str) -> None:
        """Records what a language model's weights, keys and values are kept in, and why.

        weights, kv: what was asked for. It follows from facts each time and is never replayed.
        """
        program, why = llm.program, llm.forecast.kv.partition(": ")[2]
        self.decisions.replay.clear()
        reason = "as the model is kept, else bf16" if weights == "auto" else "asked for"
        reason += f"; {program.origin}" if program.origin else ""
        self.decisions.record(
            "weights", program.description, reason=reason, overridden=weights != "auto"
        )
        self.decisions.record("keys and values", program.kv, reason=why, overridden=kv != "auto")
        self.write()

    def take_plan(self, plan: Plan, work: float, *, step: int, target_s: float) -> None:
        """Records the plan of batches, and what it was chosen from. work: of a usual request."""
        given, best = plan.rate is None, [x for x in plan.tried if x.rate and x.rate == plan.rate]
        count = plan.most if given else max(1, round(plan.work / work))
        candidates: dict[str, Mapping[str, float | str | None]] = {}
        for tried in plan.tried:
            worse = f"fewer than {tried.best:.4g}" if tried.best else "no rate is in time"
            candidates[tried.name] = (
                {_UNIT: None, "failed": worse} if tried.rate is None else {_UNIT: tried.rate}
            )
        within = f"99% within {1000 * target_s:g} ms, on measured steps"
        found = f"highest rate with {within}" if plan.rate else f"no rate holds {within}"
        self.decisions.record(
            _FOLLOWS,
            best[-1].name if best else Tried(count, plan.delay_s, None, 0.0).name,
            candidates,
            "asked for" if given else found,
            unit=_UNIT,
            overridden=given,
            step=step,
        )
        self.write()

    def take_placement(self, placement: Placement | None) -> None:
        """Records where the threads lie that compute; nothing where there was no choice."""
        if placement is None:
            return
        seconds = {_ANYWHERE: placement.free_s}
        if placement.own_s is not None:
            seconds[_OWN] = placement.own_s
        self.decisions.record(
            "threads",
            _OWN if placement.own else _ANYWHERE,
            {name: {"ms": 1000 * found} for name, found in seconds.items()},
            f"{placement.threads} threads; how long they take to wake after a pause",
            unit="ms",
            fact=True,
        )
        self.write()


def record_of(given: str | None, name: str, model: str) -> Record:
    """The record in the folder that was given, or in the cache folder. model: a path, or the words
    of --module."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:60]
    digest = _identity(model)
    folder = cache_folder() / "serving" / f"{safe}-{digest}" if given is None else given
    return Record(folder, f"{Path(model).resolve().name}, {digest}")


def _identity(model: str) -> str:
    """Digest of a path and of how its files look, so that other weights begin anew."""
    path = Path(model)
    words = [str(path.resolve())]
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            found = file.stat()
            words.append(f"{file.name} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\n".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:12]
