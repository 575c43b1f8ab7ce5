"""What a run goes on from: its generations on the disk, and the losses that can be compared."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from lezero import checkpoint
from lezero.core import groups
from lezero.core.errors import FileError, NumericsError
from lezero.data.loader import Rows
from lezero.files import list_generations, read_generation, step_of, step_path
from lezero.train import engine_state, recipe
from lezero.train.config import RunConfig
from lezero.train.engine import Engine
from lezero.train.run_folder import RunFolder

BEFORE_SKIPS = "before-skips"


def finite(loss: float) -> float | None:
    """The loss, or None for one that is NaN or infinite."""
    return loss if math.isfinite(loss) else None


def find_checkpoint(folder: RunFolder, resume: bool) -> checkpoint.Loaded | None:
    """What the newest generation that the run goes on from says of itself; its tensors come later.

    That all are damaged is an error.
    """
    there = False
    if groups.is_main():
        # Ranks that a launcher started again go on with what they had, whatever the config says.
        there = (resume or folder.begun()) and bool(list_generations(folder.checkpoints))
    return engine_state.peek(folder.checkpoints) if groups.broadcast_object(there) else None


class BestLosses:
    """Each validation loss of a run that was the best one so far, with its step, which is marked
    "best" when it is written."""

    def __init__(self) -> None:
        self._found: dict[int, float] = {}

    def add(self, step: int, loss: float) -> None:
        self._found[step] = loss

    def forget(self, step: int) -> None:
        """That step was not written: what is not on the disk is not the best one there."""
        self._found.pop(step, None)

    @property
    def step(self) -> int | None:
        return next(reversed(self._found), None)

    @property
    def loss(self) -> float | None:
        return None if self.step is None else self._found[self.step]


def validation_set(config: RunConfig, rows: Rows) -> dict[str, Any]:
    """What tells whether two validation losses can be compared."""
    wanted = config.validation.batches
    sequences = len(rows) if wanted is None else min(len(rows), wanted * config.train.batch)
    return {"digest": rows.digest, "sequences": sequences}


def leave_history(saver: checkpoint.Saver, step: int) -> list[tuple[str, str]]:
    """Moves generations after `step` aside, with the marks that name them: the run is about to
    write others under their numbers. A mark that cannot be read stays: while it does, retention
    keeps what it may mean. Returns what a person should hear of it, with its level."""
    if not saver.leads:
        return []
    moved = saver.rewind(step)
    notes = []
    for name in ("best", "last"):
        try:
            checkpoint.read_mark(saver.root, name)
        except FileError as error:
            text = f"the mark '{name}' is damaged, no checkpoint that it may mean is deleted: "
            notes.append((f"{text}{error}", "warning"))
    if moved:
        many = "1 checkpoint" if len(moved) == 1 else f"{len(moved)} checkpoints"
        notes.append((f"moved aside: {many} after step {step}, as superseded-…", "info"))
    return notes


def mark_best(saver: checkpoint.Saver, step: int) -> bool:
    """Marks a good generation "best" whose mark a kill has prevented; returns, on every rank,
    whether there is a generation of that step. A mark that cannot be read stays."""
    path = step_path(saver.root, step)
    with contextlib.suppress(FileError, OSError):
        if saver.leads and checkpoint.read_mark(saver.root, "best") != step:
            read_generation(path, select=lambda _: False)
            saver.mark("best", step)
    return bool(groups.broadcast_object(path.exists()))


def keep_before(saver: checkpoint.Saver | None, engine: Engine) -> str:
    """What a run that ends says, on every rank, where it ends at a skipped step, whose weights may
    be ruined: the newest checkpoint of before is marked, so that it stays beside what is written
    now. Else ""."""
    if saver is None or not engine.skipped_in_a_row:
        return ""
    saver.wait()
    kept = ""
    for path in reversed(list_generations(saver.root) if saver.leads else []):
        with contextlib.suppress(FileError, OSError):
            documents = read_generation(path, select=lambda _: False).documents
            if not documents["state"].get("skipped_in_a_row"):
                saver.mark(BEFORE_SKIPS, step_of(path) or 0)
                kept = path.name
                break
    kept = groups.broadcast_object(kept)
    return kept and (
        f"step {engine.step} was skipped ({engine.skipped_in_a_row} in a row), so its weights may "
        f"be ruined: {kept} stays beside it, marked '{BEFORE_SKIPS}'; where a later start skips "
        "on, move what is newer away"
    )


@contextlib.contextmanager
def way_back_told(saver: checkpoint.Saver | None) -> Iterator[None]:
    """A `NumericsError` inside ends with what a later start goes on from."""
    try:
        yield
    except NumericsError as error:
        assert saver is not None
        saver.wait()
        found = [path.name for path in list_generations(saver.root)]
        back = "No checkpoint was written: a later start begins anew"
        if found:
            then = f"the next goes on from {found[-2]}" if found[1:] else "the next begins anew"
            back = (
                f"With checkpoint.resume=true a later start goes on from {saver.root / found[-1]}; "
                f"where it ends in the same way, move that folder away, and {then}"
            )
        error.args = (f"{str(error).rstrip('.')}. {back}",)
        raise


def cursor_of(loaded: checkpoint.Loaded, config: RunConfig, vocab: int) -> Any:
    """The place in the data of a checkpoint; `FileError` for one of another model or optimizer."""
    try:
        cursor, shape = loaded.documents["cursor"], loaded.documents["model"]
        before = loaded.documents["config"]["train"]
    except KeyError as error:
        raise FileError(
            f"{loaded.path} was not written by a run of the trainer (no {error}); "
            "name another run folder, or set checkpoint.resume=false"
        ) from None
    now = recipe.model_config(config, vocab).to_dict()
    other = [f"{key}: {shape.get(key)} → {now[key]}" for key in now if shape.get(key) != now[key]]
    what = f"another model ({', '.join(other)})" if other else ""
    if not other and (changed := recipe.lost_state(config.train, before)):
        what = f"another optimizer ({changed})"
    if what:
        raise FileError(
            f"{loaded.path} is of {what}: name another run folder, or set checkpoint.resume=false"
        )
    return cursor
