"""Loading: the newest good generation of a run, or exactly the one that was named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lezero.checkpoint.marks import read_mark
from lezero.core.errors import CorruptError, FileError
from lezero.core.log import logger
from lezero.files import Generation, list_generations, read_generation, step_of, step_path

_RELISTS = 20

Select = Callable[[str], bool] | None


@dataclass(frozen=True)
class Loaded:
    """A verified generation, on the CPU, and the newer ones that were refused, with reasons."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    documents: dict[str, Any]
    created: str = ""
    rejected: list[tuple[Path, str]] = field(default_factory=list)

    def section(self, name: str) -> dict[str, Tensor]:
        """The tensors called `name/…`, without that prefix: `section("model")` is a state dict."""
        return {
            key.removeprefix(f"{name}/"): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(f"{name}/")
        }


def load(path: str | Path, *, mark: str | None = None, select: Select = None) -> Loaded:
    """Loads and verifies a generation.

    `path` is one generation, which then loads or raises; or a checkpoint root, or a run folder with
    `checkpoints/` in it: then the newest good generation is taken, and each newer one that is
    damaged is logged and listed in `rejected`. `mark="best"` takes the marked one of a root.
    `select` keeps only the tensors it says yes to. Raises `CorruptError` naming file and tensor, or
    listing every generation when none is good, and `FileError` when there is nothing to load.
    """
    path = Path(path)
    if is_generation(path):
        return _loaded(read_generation(path, select=select), [])
    root = checkpoint_root(path)
    if mark is not None:
        step = read_mark(root, mark)
        if step is None:
            raise FileError(f"{root}: no generation is marked '{mark}'")
        return _loaded(read_generation(step_path(root, step), select=select), [])
    return _newest_good(root, select)


def is_generation(path: Path) -> bool:
    """True for one generation's folder, False for a folder of generations or of a run."""
    return step_of(path) is not None or (path / "manifest.json").exists()


def checkpoint_root(path: Path) -> Path:
    """The folder that holds the generations of `path`, a checkpoint root or a run folder."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() and not list_generations(path) else path


def _newest_good(root: Path, select: Select) -> Loaded:
    """Tries from the newest on. A writer may prune one meanwhile; then the list is read again."""
    rejected: dict[Path, str] = {}
    for _ in range(_RELISTS):
        paths = list_generations(root)
        gone = False
        for path in reversed(paths):
            if path in rejected:
                continue
            try:
                made = read_generation(path, select=select)
            except FileError as error:
                gone = not path.exists()
                if gone:
                    break
                rejected[path] = str(error)
                logger("checkpoint").warning(f"{path.name} is not used: {error}")
                continue
            return _loaded(made, list(rejected.items()))
        if not gone:
            break
    if not rejected:
        missing = "it is no folder" if not root.is_dir() else "it holds no generation"
        raise FileError(f"{root}: nothing to load, {missing}")
    reasons = "\n".join(f"  {reason}" for reason in rejected.values())
    raise CorruptError(f"{root}: no good generation among {len(rejected)}:\n{reasons}")


def _loaded(made: Generation, rejected: list[tuple[Path, str]]) -> Loaded:
    return Loaded(made.path, made.step, made.tensors, made.documents, made.created, rejected)
