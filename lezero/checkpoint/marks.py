"""Names for generations: `best.json` and `last.json` beside them say which step is meant."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from lezero import __version__
from lezero.core.errors import CorruptError, FileError
from lezero.core.paths import expand_home
from lezero.files import read_small, seal, step_path, unseal, write_file

FORMAT = 1
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_LIMIT = 1 << 12
_USUAL = ("best", "last")


def write_mark(root: Path, name: str, step: int) -> None:
    """Points `name` at generation `step`, which must exist."""
    if not _NAME.fullmatch(name):
        raise FileError(f"mark {name!r}: allowed are small letters, digits and '-', as in 'best'")
    if not step_path(root, step).is_dir():
        raise FileError(f"{root}: there is no generation {step} to mark as '{name}'")
    write_file(Path(root) / f"{name}.json", seal(FORMAT, {"mark": name, "step": step}))


def read_mark(root: Path, name: str) -> int | None:
    """The step that `name` points at; None when there is no such mark, an error when damaged."""
    path = Path(expand_home(root)) / f"{name}.json"
    if not _NAME.fullmatch(name) or not path.exists():
        return None
    raw = read_small(str(path), str(path), _LIMIT)
    data = unseal(raw, str(path), FORMAT, __version__)
    step = data.get("step")
    if data.get("mark") != name or type(step) is not int or step < 0:
        raise CorruptError(f"{path}: this is no mark '{name}'")
    return step


def read_marks(root: Path) -> tuple[dict[int, str], list[Path]]:
    """The marks in `root`: their names by step (the first, where a step has several), and the files
    of those that are damaged. Others may keep JSON of theirs there."""
    names: dict[int, str] = {}
    damaged = []
    for path in sorted(Path(root).glob("*.json")):
        try:
            step = read_mark(root, path.stem)
        except FileError:
            if path.stem in _USUAL or _speaks_of_a_mark(path):
                damaged.append(path)
            continue
        if step is not None:
            names.setdefault(step, path.stem)
    return names, damaged


def remove_marks(root: Path, left: Callable[[int], bool]) -> None:
    """Removes the marks of steps whose generations are of a history that was `left`, so that they
    do not come to mean others of the same number. Those that are damaged stay."""
    for path in Path(root).glob("*.json"):
        with contextlib.suppress(FileError):
            step = read_mark(root, path.stem)
            if step is not None and left(step):
                path.unlink(missing_ok=True)


def _speaks_of_a_mark(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return b'"mark"' in file.read(_LIMIT)
    return True
