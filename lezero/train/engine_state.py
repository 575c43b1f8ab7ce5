"""An engine's whole state, as tensors by name and documents, and back.

What a generation holds: weights (`model/…`), optimizer state by parameter name (`optimizer/…`),
the generators of every rank (`random/…`) and the documents `state` (step, precision, loss scale),
`decisions` and `environment`. Restoring checks everything before it changes anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lezero import checkpoint
from lezero.core import groups
from lezero.core.decisions import Decisions
from lezero.core.errors import FileError, LeZeroError
from lezero.core.log import logger
from lezero.files import step_path

if TYPE_CHECKING:
    from lezero.train.engine import Engine

log = logger("train")
_MODEL = "model/"


def names_of(engine: Engine) -> dict[str, torch.nn.Parameter]:
    """Every parameter by its name."""
    return dict(engine.model.named_parameters())


def pack(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors (not copied) and documents of the engine. Every rank must call it together."""
    tensors = {_MODEL + name: value for name, value in engine.model.state_dict().items()}
    found, optimizer = checkpoint.pack_optimizer(engine.optimizer, names_of(engine))
    tensors |= found
    random_tensors, everyone = _pack_random()
    tensors |= random_tensors
    documents = {
        "state": {
            "step": engine.step,
            "seed": engine.seed,
            "precision": {**engine.precision.state(), "asked": engine.asked_precision},
            "skipped_in_a_row": engine.skipped_in_a_row,
        },
        "optimizer": optimizer,
        "random": everyone,
        "decisions": engine.decisions.to_json(),
        "environment": checkpoint.environment(),
    }
    return tensors, documents


def _random_prefix(rank: int) -> str:
    return f"random/{rank}/"


def _pack_random() -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The generators of every rank. A step draws from (seed, step) and needs none of them; they
    are the caller's, whose own code may."""
    tensors, document = checkpoint.pack_random(prefix="")
    mine = {"tensors": {k: [str(v.dtype)[6:], v.tolist()] for k, v in tensors.items()}}
    everyone = groups.gather_objects({**mine, "document": document})
    packed = {
        _random_prefix(rank) + name: torch.tensor(values, dtype=getattr(torch, dtype))
        for rank, one in enumerate(everyone)
        for name, (dtype, values) in one["tensors"].items()
    }
    return packed, [one["document"] for one in everyone]


def restore(engine: Engine, loaded: checkpoint.Loaded) -> dict[str, Any]:
    """Puts a loaded generation into the engine; returns its documents.

    Raises `FileError` naming the tensors when it belongs to another model, before any change.
    """
    state = loaded.documents["state"]
    own = engine.model.state_dict()
    saved = {
        name.removeprefix(_MODEL): value
        for name, value in loaded.tensors.items()
        if name.startswith(_MODEL)
    }
    _check_model(loaded.path, own, saved)
    _warn_of_differences(loaded)
    checkpoint.unpack_optimizer(
        engine.optimizer, names_of(engine), loaded.tensors, loaded.documents["optimizer"]
    )
    engine.model.load_state_dict(saved)
    engine.step = int(state["step"])
    engine.skipped_in_a_row = int(state["skipped_in_a_row"])
    _restore_precision(engine, state["precision"])
    engine.decisions.replay = Decisions.from_json(loaded.documents["decisions"]).replay
    everyone = loaded.documents["random"]
    if len(everyone) == groups.world_size():
        rank = groups.rank()
        checkpoint.unpack_random(loaded.tensors, everyone[rank], prefix=_random_prefix(rank))
    return loaded.documents


def _restore_precision(engine: Engine, state: dict[str, Any]) -> None:
    """The checkpoint's precision, one changed in mid-run included, unless the user asks for another
    than was asked for then."""
    same = engine.asked_precision in ("auto", state.get("asked"))
    if same and engine.precision.name != state["name"]:
        engine.set_precision(state["name"])
    engine.precision.load_state(state)


def save(engine: Engine, root: Path, documents: dict[str, Any]) -> Path:
    """Writes one generation and waits until it is durable."""
    tensors, own = pack(engine)
    error = ""
    if groups.is_main():
        with checkpoint.Saver(root) as saver:
            saver.save(engine.step, tensors, {**own, **documents})
            saver.wait()
            error = str(saver.error or "")
    error = groups.broadcast_object(error)
    if error:
        raise LeZeroError(f"the checkpoint of step {engine.step} was not written: {error}")
    return step_path(root, engine.step)


def load(engine: Engine, path: Path) -> dict[str, Any]:
    """Rank 0 finds the newest good generation (or checks the one named); every rank loads it."""
    loaded = load_together(path)
    return restore(engine, loaded)


def load_together(path: Path) -> checkpoint.Loaded:
    """The same verified generation on every rank; errors are the same on every rank too."""
    loaded: checkpoint.Loaded | None = None
    problem: dict[str, str] = {}
    if groups.is_main():
        try:
            loaded = checkpoint.load(path)
        except LeZeroError as error:
            if groups.world_size() == 1:
                raise
            problem = {"error": str(error)}
    answer = groups.broadcast_object(problem or {"path": str(loaded.path) if loaded else ""})
    if "error" in answer:
        raise FileError(answer["error"])
    return loaded or checkpoint.load(Path(answer["path"]))


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
    if differences:
        log.warning(
            "resuming in another environment (%s): the run goes on, but its figures need not be "
            "bit for bit those of an uninterrupted one",
            "; ".join(differences),
        )
