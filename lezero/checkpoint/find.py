"""Loading: the newest good generation of a run, or exactly the one that was named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from lezero.checkpoint.marks import read_mark
from lezero.core import groups
from lezero.core.errors import CapacityError, CorruptError, FileError
from lezero.core.log import logger
from lezero.core.paths import expand_home
from lezero.files import (
    Form,
    Generation,
    Rows,
    Select,
    list_generations,
    read_documents,
    read_generation,
    step_of,
    step_path,
)

_RELISTS = 100

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A verified generation, on the CPU, and the newer ones that were refused, with reasons."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    documents: dict[str, Any]
    created: str = ""
    rejected: list[tuple[Path, str]] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)
    """Type and whole shape of every stored tensor, whether it was read or not."""

    def __repr__(self) -> str:
        refused = f", {len(self.rejected)} newer refused" if self.rejected else ""
        return f"<Loaded: step {self.step} of {self.path}, {len(self.tensors)} tensors{refused}>"

    def section(self, name: str) -> dict[str, Tensor]:
        """The tensors called `name/…`, without that prefix: `section("model")` is a state dict."""
        return {
            key.removeprefix(f"{name}/"): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(f"{name}/")
        }


def load(
    path: str | Path,
    *,
    mark: str | None = None,
    select: Select | None = None,
    rows: Rows | None = None,
) -> Loaded:
    """Loads and verifies a generation, in this process.

    `path` is one generation, which then loads or raises; or a checkpoint root, or a run folder with
    `checkpoints/` in it: then the newest good generation is taken, and each newer one that is
    damaged is logged and listed in `rejected`. `mark="best"` takes the marked one of a root.
    `select` keeps only the tensors it says yes to, `rows` some rows of them; without it tensors
    come whole, however many ranks have written them. Raises `CorruptError` naming file and tensor,
    or listing every generation when none is good, `FileError` when there is nothing to load, and
    `ConfigError` for rows that a tensor does not have.
    """
    return _load(Path(expand_home(path)), mark, Reader(lambda _: Wanted(select, rows)))


def load_together(path: str | Path, want: Want | None = None) -> Loaded:
    """As `load`, by every rank together: all load the same generation, or raise the same error.

    `want(documents)` says what this rank needs of a generation; without it, everything. A
    generation counts as good when what every rank needs of it is.
    """
    want = want or (lambda _: Wanted())
    reader = Reader(want) if groups.world_size() == 1 else TogetherReader(want)
    return _load(Path(expand_home(path)), None, reader)


class Wanted(NamedTuple):
    """What to read of a generation: tensors by name, and which rows of them; None for all."""

    select: Select | None = None
    rows: Rows | None = None


Want = Callable[[Mapping[str, Any]], Wanted]


class Reader:
    """How one process looks at a checkpoint folder."""

    def __init__(self, want: Want) -> None:
        self.want = want

    def see(self, look: Callable[[], T]) -> T:
        """What `look` finds on the disk (plain data)."""
        return look()

    def read(self, path: Path) -> Generation:
        select, rows = self.want(read_documents(path))
        return read_generation(path, select=select, rows=rows)


class TogetherReader(Reader):
    """Every rank sees what rank 0 sees, and what one cannot read no rank takes."""

    def see(self, look: Callable[[], T]) -> T:
        answer: dict[str, Any] = {}
        if groups.is_main():
            try:
                answer = {"seen": look()}
            except FileError as error:
                answer = {"error": str(error)}
        answer = groups.broadcast_object(answer)
        if "error" in answer:
            raise FileError(answer["error"])
        seen: T = answer["seen"]
        return seen

    def read(self, path: Path) -> Generation:
        made, full, problem = None, False, ""
        try:
            made = super().read(path)
        except (FileError, CapacityError) as error:
            full, problem = isinstance(error, CapacityError), str(error)
        answers = groups.gather_objects([problem, full])
        texts = "; ".join(dict.fromkeys(str(text) for text, _ in answers if text))
        if any(short for _, short in answers):
            raise CapacityError(texts)
        if texts:
            raise CorruptError(texts)
        assert made is not None
        return made


def is_generation(path: Path) -> bool:
    """True for one generation's folder, False for a folder of generations or of a run."""
    return step_of(path) is not None or (path / "manifest.json").exists()


def checkpoint_root(path: Path) -> Path:
    """The folder that holds the generations of `path`, a checkpoint root or a run folder;
    `FileError` where it is both, since nobody knows which one is meant."""
    inner = path / "checkpoints"
    if not list_generations(path):
        return inner if inner.is_dir() else path
    if inner.is_dir() and list_generations(inner):
        raise FileError(
            f"{path}: holds checkpoints, and those of a run in {inner.name}/; name {inner}, or one "
            f"generation, as {list_generations(path)[-1]}"
        )
    return path


def _load(path: Path, mark: str | None, reader: Reader) -> Loaded:
    if reader.see(lambda: is_generation(path)):
        return _loaded(reader.read(path), [])
    root = Path(reader.see(lambda: str(checkpoint_root(path))))
    if mark is not None:
        step = reader.see(lambda: read_mark(root, mark))
        if step is None:
            raise FileError(f"{root}: no generation is marked '{mark}'")
        return _loaded(reader.read(step_path(root, step)), [])
    return _newest_good(root, reader)


def _newest_good(root: Path, reader: Reader) -> Loaded:
    """Tries from the newest on. A writer may prune one meanwhile; then the list is read again."""
    rejected: dict[Path, str] = {}
    for _ in range(_RELISTS):
        names = reader.see(lambda: [path.name for path in list_generations(root)])
        gone = False
        for path in (root / name for name in reversed(names)):
            if path in rejected:
                continue
            try:
                made = reader.read(path)
            except FileError as error:
                gone = not reader.see(path.exists)
                if gone:
                    break
                rejected[path] = str(error)
                continue
            for bad, reason in rejected.items():  # if none is good, the error lists them
                logger("checkpoint").warning(f"{bad.name} is not used: {reason}")
            return _loaded(made, list(rejected.items()))
        if not gone:
            break
    else:
        raise FileError(
            f"{root}: {_RELISTS} times a generation was removed while it was read: another process "
            "saves here and keeps few. Load when it is done, or let it keep more (checkpoint.keep)."
        )
    if not rejected:
        missing = "it is no folder" if not root.is_dir() else "it holds no generation"
        raise FileError(f"{root}: nothing to load, {missing}")
    reasons = "\n".join(f"  {reason}" for reason in rejected.values())
    raise CorruptError(f"{root}: no good generation among {len(rejected)}:\n{reasons}")


def _loaded(made: Generation, rejected: list[tuple[Path, str]]) -> Loaded:
    return Loaded(
        path=made.path,
        step=made.step,
        tensors=made.tensors,
        documents=made.documents,
        created=made.created,
        rejected=rejected,
        forms=made.forms,
    )
