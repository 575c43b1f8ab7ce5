"""An engine's whole state, as tensors by name and documents, and back.

What a generation holds: weights (`model/…`), optimizer state by parameter name (`optimizer/…`), the
generators of every rank (`random/…`), what encoding lost on the wires of every rank (`feedback/…`,
see `train/feedback.py`) and the documents `state` (step, precision, loss scale), `decisions` and
`environment`. Every rank writes the rows that it has, and reads those that it needs, so that any
number of ranks at any stage of ZeRO can go on from any other. Restoring checks everything before it
changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lezero import checkpoint
from lezero.core import groups
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError, FileError, LeZeroError
from lezero.core.log import logger
from lezero.files import step_path
from lezero.parallel.zero import sharding_of
from lezero.train import feedback

if TYPE_CHECKING:
    from lezero.train.engine import Engine

log = logger("train")
_MODEL, _OPTIMIZER = "model/", "optimizer/"
_DOCUMENTS = "state", "optimizer", "random", "decisions", "environment"


def names_of(engine: Engine) -> dict[str, torch.nn.Parameter]:
    """Every parameter by its name."""
    return dict(engine.model.named_parameters())


@dataclass(frozen=True)
class Packed:
    """`tensors` are the same on every rank (DTensors: each has its rows), `own` this rank's."""

    tensors: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]
    documents: dict[str, Any]


def pack(engine: Engine) -> Packed:
    """Tensors (not copied) and documents of the engine. Every rank must call it together."""
    tensors = {_MODEL + name: value for name, value in engine.model.state_dict().items()}
    found, optimizer = checkpoint.pack_optimizer(engine.optimizer, names_of(engine))
    tensors |= found
    # A step draws from (seed, step) and needs no generator; they are for the caller's own code.
    own, random = checkpoint.pack_random(prefix=_random_prefix())
    pending, lines = feedback.pack(engine.model)
    documents = {
        "state": {
            "step": engine.step,
            "seed": engine.seed,
            "precision": {**engine.precision.state(), "asked": engine.asked_precision},
            "skipped_in_a_row": engine.skipped_in_a_row,
        },
        "optimizer": optimizer,
        "random": groups.gather_objects(random),
        "feedback": lines,
        "decisions": engine.decisions.to_json(),
        "environment": checkpoint.environment(),
    }
    return Packed(tensors, {**own, **pending}, documents)


def _random_prefix() -> str:
    return f"random/{groups.rank()}/"


def peek(path: Path) -> checkpoint.Loaded:
    """The documents of the newest generation whose manifest is good, without its tensors.

    The same on every rank, as are the errors.
    """
    return checkpoint.load_together(path, lambda _: checkpoint.Wanted(lambda name: False))


def find(engine: Engine, path: Path) -> checkpoint.Loaded:
    """The newest good generation (or the one named), the same on every rank.

    Each rank reads what it needs: its rows of the model and of the optimizer's state.
    """
    likes = _likes(engine)

    def rows(name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        like = _like(likes, name, shape)
        return None if like is None else checkpoint.rows_of(name, like)

    def want(documents: Mapping[str, Any]) -> checkpoint.Wanted:
        missing = [name for name in _DOCUMENTS if name not in documents]
        if missing:
            raise FileError(
                f"{path} was not written by an Engine: it has no document '{missing[0]}'; load its "
                "tensors with lezero.checkpoint.load"
            )
        random = _random_prefix() if _same_ranks(documents) else "-"
        pending = feedback.prefixes(engine.model, documents)
        prefixes = (_MODEL, _OPTIMIZER, random, *pending)
        return checkpoint.Wanted(lambda name: name.startswith(prefixes), rows)

    return checkpoint.load_together(path, want)


def _same_ranks(documents: Mapping[str, Any]) -> bool:
    return len(documents["random"]) == groups.world_size()


def _likes(engine: Engine) -> dict[str, torch.Tensor]:
    """The split tensors of the engine: names as in a generation, state's without its last part."""
    found = {_MODEL + name: value for name, value in engine.model.state_dict().items()}
    found |= {_OPTIMIZER + name: value for name, value in names_of(engine).items()}
    return {name: value for name, value in found.items() if checkpoint.is_split(value)}


def _like(likes: Mapping[str, torch.Tensor], name: str, shape: Sequence[int]) -> Any:
    """What a stored tensor is split like; None for whole ones. State of as many rows as its
    parameter is split as that is."""
    like = likes.get(name.rpartition("/")[0] if name.startswith(_OPTIMIZER) else name)
    by_rows = like is not None and len(shape) > 0 and like.dim() > 0 and shape[0] == like.shape[0]
    return like if by_rows else None


def restore(engine: Engine, loaded: checkpoint.Loaded) -> dict[str, Any]:
    """Puts a loaded generation into the engine; returns its documents.

    Raises `FileError` naming the tensors when it belongs to another model, before any change.
    """
    state = loaded.documents["state"]
    own, likes = engine.model.state_dict(), _likes(engine)
    tensors = {
        name: checkpoint.split_like(value, like, loaded.forms[name].shape)
        if (like := _like(likes, name, loaded.forms[name].shape)) is not None
        else value
        for name, value in loaded.tensors.items()
    }
    saved = {
        name.removeprefix(_MODEL): value
        for name, value in tensors.items()
        if name.startswith(_MODEL)
    }
    _check_model(loaded.path, own, saved)
    _warn_of_differences(loaded)
    checkpoint.unpack_optimizer(
        engine.optimizer, names_of(engine), tensors, loaded.documents["optimizer"]
    )
    engine.model.load_state_dict(saved)
    engine.step = int(state["step"])
    engine.skipped_in_a_row = int(state["skipped_in_a_row"])
    _restore_precision(engine, state["precision"])
    engine.decisions.replay = Decisions.from_json(loaded.documents["decisions"]).replay
    if _same_ranks(loaded.documents):
        document = loaded.documents["random"][groups.rank()]
        checkpoint.unpack_random(loaded.tensors, document, prefix=_random_prefix())
    feedback.restore(engine.model, loaded)
    return loaded.documents


def kept_precision(state: Mapping[str, Any], asked: str) -> str | None:
    """The precision that a run goes on in from a generation's `state["precision"]`; None where
    `asked` is another than was asked for then."""
    return str(state["name"]) if asked in ("auto", state.get("asked")) else None


def _restore_precision(engine: Engine, state: dict[str, Any]) -> None:
    """The checkpoint's precision, one changed in mid-run included, unless the user asks for another
    than was asked for then."""
    kept = kept_precision(state, engine.asked_precision)
    sharded = sharding_of(engine.model) is not None  # which computes in what it was sharded for
    if kept is not None and not sharded and engine.precision.name != kept:
        engine.set_precision(kept)
    engine.precision.load_state(state)


def save(engine: Engine, root: Path, documents: dict[str, Any]) -> Path:
    """Writes one generation, every rank its part, and waits until it is durable.

    Raises `ConfigError` for a document under a name that the engine's own have.
    """
    packed = pack(engine)
    taken = sorted(packed.documents.keys() & documents.keys())
    if taken:
        raise ConfigError(
            f"documents: the engine has a document '{taken[0]}' of its own; give yours another "
            f"name than {', '.join(sorted(packed.documents))}"
        )
    with checkpoint.Saver(root, together=True) as saver:
        saver.save(engine.step, packed.tensors, {**packed.documents, **documents}, packed.own)
        error = saver.wait()
    if error is not None:
        raise LeZeroError(f"the checkpoint of step {engine.step} was not written: {error}")
    return step_path(root, engine.step)


def load(engine: Engine, path: Path) -> dict[str, Any]:
    """Finds the newest good generation, or the one named, and puts it into the engine."""
    return restore(engine, find(engine, path))


def _check_model(path: Path, own: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    shapes = [
        f"{name} is {tuple(saved[name].shape)} there and {tuple(own[name].shape)} here"
        for name in sorted(own.keys() & saved.keys())
        if own[name].shape != saved[name].shape
    ]
    problems = []
    if missing:
        problems.append(f"it lacks {_some(missing)}")
    if extra:
        problems.append(f"it has {_some(extra)}, which the model does not")
    problems += shapes[:3]
    if problems:
        raise FileError(f"{path} is of another model: " + "; ".join(problems))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _warn_of_differences(loaded: checkpoint.Loaded) -> None:
    now = checkpoint.environment()
    differences = checkpoint.environment_difference(loaded.documents["environment"], now)
    if differences and groups.is_main():
        log.warning(
            "resuming in another environment (%s): the run goes on, but its figures need not be "
            "bit for bit those of an uninterrupted one",
            "; ".join(differences),
        )
