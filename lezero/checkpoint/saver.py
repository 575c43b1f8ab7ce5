"""Saving in the background: training stands still for a copy in memory, nothing else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor

from lezero.checkpoint.buffers import HostBuffers
from lezero.checkpoint.crew import Crew
from lezero.checkpoint.marks import read_marks, remove_marks, write_mark
from lezero.checkpoint.rows import slices
from lezero.core import groups
from lezero.core.errors import ConfigError, FileError, LeZeroError
from lezero.core.log import logger
from lezero.core.paths import expand_home
from lezero.files import Slice, check_json, discard, list_generations, step_of, step_path

_log = logger("checkpoint")
_Parts = tuple[dict[str, Tensor], dict[str, Slice], dict[str, Any]]


class Saver:
    """Writes generations under `root` and keeps the newest `keep` and every marked one.

    Once a generation is complete, newer ones of a history that was left are moved aside, as
    `superseded-…`: what was saved last is what a load finds. Of those the newest `keep` stay, and
    of those with a mark, `superseded-best-…`, again the newest `keep`.

    With `together` every rank makes one, at the same time, for a root that all of them see, and all
    call `save` at the same steps: each writes the rows that it has (see `rows`), and a generation
    appears when every rank's part is durable, or nowhere. Otherwise exactly one process may own a
    Saver for a root.

    `save` copies and returns; a thread writes. A write that fails (disk full, for example) is
    passed to `on_error`, by default logged, and kept in `error`; it never stops training, and
    earlier generations stand. When a save comes while the one before is still being written,
    `busy="wait"` waits for it (counted in `stall_seconds`) and `busy="skip"` lets this one pass.
    """

    def __init__(
        self,
        root: str | Path,
        keep: int = 3,
        *,
        busy: Literal["wait", "skip"] = "wait",
        on_error: Callable[[int, Exception], None] | None = None,
        together: bool = False,
    ) -> None:
        if type(keep) is not int or keep < 1:
            raise ConfigError(f"keep: got {keep!r}, allowed is an integer from 1")
        if busy not in ("wait", "skip"):
            raise ConfigError(f"busy: got {busy!r}, allowed is wait or skip")
        self.root = Path(expand_home(root))
        self.keep = keep
        self.busy = busy
        self.stall_seconds = 0.0
        """How long the last `save` held up its caller, in seconds."""
        self.write_seconds = 0.0
        """How long the last background write took, in seconds."""
        self.error: Exception | None = None
        """Why the last write failed; None when it succeeded."""
        self._on_error = on_error or self._tell
        self._crew = Crew(alone=not together)
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._writing: int | None = None
        self._lost: int | None = None
        self._marks: list[str] = []

    @property
    def leads(self) -> bool:
        """Whether this is the one that commits, marks and deletes generations."""
        return self._crew.rank == 0

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocates the host memory for such tensors now, so that the first save is fast too."""
        self.wait()
        self._buffers.reserve(slices(tensors, self.leads)[0])

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        documents: Mapping[str, Any],
        own: Mapping[str, Tensor] | None = None,
        *,
        supersede: bool = False,
    ) -> bool:
        """Copies everything as it is now and writes it as generation `step` in the background.

        Of `tensors`, which every rank gives alike, a rank copies and writes its rows of DTensors,
        and rank 0 the rest; `own` are tensors that no other rank has, under names of their own.
        `documents` are rank 0's. With `supersede` (rank 0's) a generation that this one would
        replace is moved aside instead, as `superseded-…`, once this one is written. Returns False
        when it was skipped (see `busy`) or when the copy does not fit in memory. Raises `FileError`
        for a step, tensors or documents that cannot be stored; ranks that save together all hear of
        it, as of a write that failed.
        """
        began = time.perf_counter()
        try:
            if self.busy == "skip" and self._any_busy():
                _log.warning(f"generation {step} skipped: the one before is still being written")
                return False
            self.wait()
            parts, problem = self._copied(step, tensors, documents, own or {})
            if problem is None or self._crew.size > 1:  # who saves together hears of a problem
                self._writing = step
                self._thread = threading.Thread(
                    target=self._write, args=(step, *parts, problem, supersede), name="lezero-save"
                )
                self._thread.start()
            elif not isinstance(problem, LeZeroError):
                self._failed(step, problem)
            if isinstance(problem, LeZeroError):
                raise problem
            return problem is None
        finally:
            self.stall_seconds = time.perf_counter() - began

    def mark(self, name: str, step: int) -> None:
        """Points `name` ("best", "last") at generation `step`, which retention then keeps.

        For a generation that is still being written, this happens once it is complete; for one
        whose write failed, never: `on_error` told of it. Of ranks that save together, rank 0 does
        it.
        """
        if not self.leads:
            return
        with self._lock:
            if self._writing == step:
                self._marks.append(name)
                return
        if self._lost == step:
            return
        write_mark(self.root, name, step)

    def rewind(self, step: int) -> list[Path]:
        """Moves generations newer than `step` out of the way, as `superseded-…`; returns them.
        Their marks are removed.

        Call it when training goes on from an earlier generation than the newest one; otherwise a
        load before the next save would pick a newer one of the history that was left. Of ranks that
        save together, rank 0 does it.
        """
        self.wait()
        return self._set_aside(step) if self.leads else []

    def _set_aside(self, step: int) -> list[Path]:
        """The generations after `step`; their marks are removed."""
        moved: list[Path] = []
        names, _ = read_marks(self.root)
        for path in list_generations(self.root):
            if (step_of(path) or 0) > step:
                target = _place_aside(path, names)
                path.rename(target)
                moved.append(target)
        remove_marks(self.root, lambda marked: marked > step)
        if moved:
            _log.warning(f"{self.root}: moved aside {', '.join(path.name for path in moved)}")
        return moved

    def wait(self) -> Exception | None:
        """Returns when nothing is being written any more: `error` of the last write."""
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None
        return self.error

    def close(self) -> None:
        """Waits for the last write and frees the host memory."""
        self.wait()
        self._buffers = HostBuffers()
        self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _any_busy(self) -> bool:
        mine = self._thread is not None and self._thread.is_alive()
        return any(groups.gather_objects(mine)) if self._crew.size > 1 else mine

    def _copied(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        documents: Mapping[str, Any],
        own: Mapping[str, Tensor],
    ) -> tuple[_Parts, Exception | None]:
        """What this rank writes, as it is now, or why there is nothing."""
        try:
            step_path(self.root, step)  # refuses what is no step
            check_json(documents, "documents")
            mine, places = slices(tensors, self.leads)
            copied = self._buffers.copy({**mine, **own})
            return (copied, places, json.loads(json.dumps(documents))), None
        except (LeZeroError, MemoryError, OSError, RuntimeError) as error:
            return ({}, {}, {}), error

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        places: dict[str, Slice],
        documents: dict[str, Any],
        problem: Exception | None,
        supersede: bool,
    ) -> None:
        began = time.perf_counter()
        try:
            told = _text(problem) if problem else ""
            spared = None
            if supersede and self.leads and not told:
                spared = _place_aside(step_path(self.root, step), read_marks(self.root)[0])
            self._crew.write(self.root, step, tensors, places, documents, told, spared)
            if spared is not None and spared.exists():
                remove_marks(self.root, lambda marked: marked == step)
            self.error = self._lost = None
        except Exception as error:  # whatever it is, training goes on
            self._failed(step, error)
        finally:
            self.write_seconds = time.perf_counter() - began
            self._finish(step)

    def _finish(self, step: int) -> None:
        with self._lock:
            marks, self._marks, self._writing = self._marks, [], None
            if self.error is not None or not self.leads:
                return
            try:
                self._set_aside(step)
                for name in marks:
                    write_mark(self.root, name, step)
                self._prune()
            except Exception as error:  # the generation itself is safe
                _log.warning(f"{self.root}: {error}")

    def _prune(self) -> None:
        marked, damaged = read_marks(self.root)
        for path in damaged:
            _log.warning(f"{path} is damaged: no generation that it may mean is deleted")
        since = max((path.stat().st_mtime_ns for path in damaged), default=0)
        for path in list_generations(self.root)[: -self.keep]:
            if step_of(path) not in marked and path.stat().st_mtime_ns > since:
                discard(path)
        superseded: dict[str, list[Path]] = {}
        for path in sorted(self.root.glob("superseded-*"), key=lambda p: p.name.rsplit("-", 1)[1]):
            superseded.setdefault(path.name.partition("-step-")[0], []).append(path)
        for paths in superseded.values():
            for path in paths[: -self.keep]:
                discard(path)

    def _failed(self, step: int, error: Exception) -> None:
        self.error, self._lost = error, step
        try:
            self._on_error(step, error)
        except Exception as second:  # a broken callback must not take training down either
            _log.error(f"the error callback itself failed: {second}")

    def _tell(self, step: int, error: Exception) -> None:
        stands = list_generations(self.root)
        newest = f"the newest one is {stands[-1].name}" if stands else "there is none yet"
        _log.error(f"generation {step} was not saved, training goes on; {newest}. {_text(error)}")


def _place_aside(path: Path, names: Mapping[int, str]) -> Path:
    """Where a generation goes that is moved aside; `names` are the marks by step."""
    mark = names.get(step_of(path) or 0)
    kind = f"superseded-{mark}" if mark else "superseded"
    return path.with_name(f"{kind}-{path.name}-{time.time_ns():x}")


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, FileError) else f"{type(error).__name__}: {error}"
