"""An engine's whole state, as tensors by name and documents, and back.

What a generation holds: weights (`model/…`), optimizer state by parameter name (`optimizer/…`), the
generators of every rank (`random/…`), what encoding lost on the wires of every rank (`feedback/…`,
see `train/feedback.py`), buffers in which a rank of a sharded model differs from rank 0
(`buffers/…`) and the documents `state` (step, precision, loss scale), `extra_state` (of
modules with a `get_extra_state` that gives no tensor), `decisions` and `environment`. Every rank
writes the rows that it has, and reads those that it needs, so that any number of ranks at any stage
of ZeRO can go on from any other. Restoring checks everything before it changes anything.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA_STATE

from lezero import checkpoint
from lezero.core import device, groups
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError, CorruptError, FileError, LeZeroError
from lezero.core.log import logger
from lezero.files import not_finite, read_generation, step_path
from lezero.nn.versions import versioned, versions_of
from lezero.nn.wrappers import unwrapped
from lezero.parallel.zero import sharding_of
from lezero.parallel.zero.sharding import shardings_in
from lezero.train import feedback

if TYPE_CHECKING:
    from lezero.train.engine import Engine

log = logger("train")
_MODEL, _OPTIMIZER = "model/", "optimizer/"
_DOCUMENTS = "state", "optimizer", "random", "decisions", "environment"
_OWN = (*_DOCUMENTS, "extra_state", "feedback", "buffers")


def names_of(engine: Engine) -> dict[str, torch.nn.Parameter]:
    """Every parameter by its name in the model itself, whatever wraps it."""
    return dict(unwrapped(engine.model).named_parameters())


@dataclass(frozen=True)
class Packed:
    """`tensors` are the same on every rank (DTensors: each has its rows), `own` this rank's."""

    tensors: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]
    documents: dict[str, Any]


def pack(engine: Engine) -> Packed:
    """Tensors (not copied) and documents of the engine. Every rank must call it together.
    `OrderError` within a step."""
    engine.requests.refuse_within_step("save")
    state = unwrapped(engine.model).state_dict()
    tensors = {_MODEL + n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
    engine.options.take_new()
    found, optimizer = checkpoint.pack_optimizer(engine.optimizer, names_of(engine))
    tensors |= found
    # A step draws from (seed, step) and needs no generator; they are for the caller's own code.
    own, random = checkpoint.pack_random(_random_prefix(), device.places(engine.model))
    pending, lines = feedback.pack(engine.model)
    buffers, differ = checkpoint.pack_own_buffers(_buffers(engine, state))
    documents = {
        "state": {
            "step": engine.step,
            "seed": engine.seed,
            "precision": {**engine.precision.state(), "asked": engine.asked_precision},
            "skipped_in_a_row": engine.skipped_in_a_row,
            "tried": engine.tuner.taken,
            "ahead": engine.tuner.ahead,
            "size": engine.tuner.size,
            "total_steps": engine.total_steps,
        },
        "extra_state": {n: v for n, v in state.items() if not isinstance(v, torch.Tensor)},
        "optimizer": optimizer,
        "random": groups.gather_objects(random),
        "feedback": lines,
        "buffers": differ,
        "decisions": engine.decisions.to_json(),
        "environment": checkpoint.environment(),
    }
    return Packed(tensors, {**own, **pending, **buffers}, documents)


def _buffers(engine: Engine, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Of a sharded model's `state`, what belongs to each rank; DDP gives all ranks rank 0's."""
    if next(shardings_in(engine.model), None) is None:
        return {}
    parameters = dict(unwrapped(engine.model).named_parameters(remove_duplicate=False))
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and name not in parameters
        and not checkpoint.is_split(value)
    }


def _random_prefix() -> str:
    return f"random/{groups.rank()}/"


def peek(path: Path) -> checkpoint.Loaded:
    """The documents of the newest generation whose manifest is good, without its tensors.

    The same on every rank, as are the errors.
    """
    return checkpoint.load_together(path, lambda _: checkpoint.Wanted(_nothing))


def find(engine: Engine, path: Path) -> checkpoint.Loaded:
    """The newest good generation (or the one named), the same on every rank.

    Each rank reads what it needs: its rows of the model and of the optimizer's state.
    """
    likes = _likes(engine)

    def rows(name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        like = _like(likes, name, shape) if shape else None
        return None if like is None else checkpoint.rows_of(name, like)

    def want(documents: Mapping[str, Any]) -> checkpoint.Wanted:
        missing = [name for name in _DOCUMENTS if name not in documents]
        if missing:
            raise FileError(
                f"{path} was not written by an Engine: it has no document '{missing[0]}'; load its "
                "tensors with lezero.checkpoint.load"
            )
        own = (_random_prefix(), checkpoint.own_buffers_prefix())
        pending = feedback.prefixes(engine.model, documents)
        prefixes = (_MODEL, _OPTIMIZER, *pending, *(own if _same_ranks(documents) else ()))
        return checkpoint.Wanted(lambda name: name.startswith(prefixes), rows)

    return checkpoint.load_together(path, want)


def _same_ranks(documents: Mapping[str, Any]) -> bool:
    return len(documents["random"]) == groups.world_size()


def _likes(engine: Engine) -> dict[str, torch.Tensor]:
    """The split tensors of the engine: names as in a generation, state's without its last part."""
    found = {_MODEL + name: value for name, value in unwrapped(engine.model).state_dict().items()}
    found |= {_OPTIMIZER + name: value for name, value in names_of(engine).items()}
    return {name: value for name, value in found.items() if checkpoint.is_split(value)}


def _like(
    likes: Mapping[str, torch.Tensor],
    name: str,
    shape: Sequence[int],
    counters: Collection[str] = ("step",),
) -> Any:
    """What a stored tensor is split like; None for whole ones. State of as many rows as its
    parameter is split as that is; of one without dims what is no counter."""
    parameter, _, key = checkpoint.outer_name(name).rpartition("/")
    like = likes.get(parameter if name.startswith(_OPTIMIZER) else name)
    if like is None or like.dim() == 0:
        return like if like is not None and not shape and key not in counters else None
    return like if shape and shape[0] == like.shape[0] else None


def _counters(engine: Engine, loaded: checkpoint.Loaded) -> set[str]:
    """What the optimizer keeps as one number for each parameter, whatever the parameter's shape."""
    dims = {_OPTIMIZER + name: value.dim() for name, value in names_of(engine).items()}
    names = (checkpoint.outer_name(n) for n, form in loaded.forms.items() if not form.shape)
    state = (name.rpartition("/") for name in names)
    return {"step", *(key for parameter, _, key in state if dims.get(parameter, 0))}


def restore(engine: Engine, loaded: checkpoint.Loaded) -> dict[str, Any]:
    """Puts a loaded generation into the engine; returns its documents.

    Raises `FileError` naming the tensors when it belongs to another model, before any change.
    """
    state = loaded.documents["state"]
    model, likes, counters = unwrapped(engine.model), _likes(engine), _counters(engine, loaded)
    stored, record = _without_masters(engine, loaded)
    tensors = {
        name: checkpoint.split_like(value, like, loaded.forms[name].shape)
        if (like := _like(likes, name, loaded.forms[name].shape, counters)) is not None
        else value
        for name, value in stored.items()
    }
    saved = {
        name.removeprefix(_MODEL): value
        for name, value in tensors.items()
        if name.startswith(_MODEL)
    } | loaded.documents.get("extra_state", {})
    saved |= loaded.section(checkpoint.own_buffers_prefix().rstrip("/"))
    _check_model(loaded.path, model.state_dict(), saved)
    _warn_of_differences(loaded)
    _warn_of_buffers(loaded)
    engine.options.take_new()
    checkpoint.unpack_optimizer(engine.optimizer, names_of(engine), tensors, record)
    model.load_state_dict(versioned(saved, versions_of(model)))
    inner = checkpoint.inner_optimizers(engine.optimizer, names_of(engine), of_closed=True)
    for optimizer in (engine.optimizer, *inner.values()):
        if (take_exact := getattr(optimizer, "take_exact", None)) is None:
            continue
        for name, parameter in names_of(engine).items():
            value = saved.get(name)  # None where the model's own hooks leave it out
            if value is not None and value.dtype == torch.float32 != parameter.dtype:
                take_exact(parameter, value)  # which loading has rounded
    engine.step = int(state["step"])
    engine.skipped_in_a_row = int(state["skipped_in_a_row"])
    if state.get("total_steps", engine.total_steps) == engine.total_steps:
        engine.tuner.forget(list(state["tried"]), state["ahead"], int(state["size"]))
    else:  # what was timed for a run of another length may be of forms that are not tried in this
        engine.tuner.forget([], None, 0)
    _restore_precision(engine, state["precision"])
    engine.decisions.replay = Decisions.from_json(loaded.documents["decisions"]).replay
    if _same_ranks(loaded.documents):
        document = loaded.documents["random"][groups.rank()]
        checkpoint.unpack_random(loaded.tensors, document, prefix=_random_prefix())
    feedback.restore(engine.model, loaded)
    return loaded.documents


def _without_masters(
    engine: Engine, loaded: checkpoint.Loaded
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the optimizer's record, where weights in fp32 are the masters that weights in
    bf16 had."""
    document = loaded.documents["optimizer"]
    try:
        exact, tensors, document = checkpoint.weights_of_masters(
            names_of(engine), loaded.section("model"), loaded.tensors, document
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise FileError(f"the optimizer's record is damaged: {error!r}") from None
    held = dict(unwrapped(engine.model).named_parameters(remove_duplicate=False))
    for name, value in exact.items():  # by all names of a tied weight
        same = (other for other, parameter in held.items() if parameter is held[name])
        tensors |= {_MODEL + other: value for other in same}
    return tensors, document


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
        why = _why_spared(saver, engine.step, packed.tensors)
        documents = {**packed.documents, **_written(documents)}
        saver.save(engine.step, packed.tensors, documents, packed.own, supersede=bool(why))
        error = saver.wait()
    if error is not None:
        raise LeZeroError(f"the checkpoint of step {engine.step} was not written: {error}")
    path = step_path(root, engine.step)
    if why:
        log.warning("%s %s. It was moved aside", path, why)
    return path


def _written(documents: dict[str, Any]) -> dict[str, Any]:
    try:
        return {name: not_finite.written(value) for name, value in documents.items()}
    except RecursionError:
        return documents  # the saver says that they are nested too deep


def _why_spared(saver: checkpoint.Saver, step: int, tensors: Mapping[str, torch.Tensor]) -> str:
    """Why rank 0 moves the generation that the save of `step` would replace aside; "" for one of
    this model, and one that is damaged. Two engines may have been given one folder."""
    path = step_path(saver.root, step)
    if not saver.leads or not os.path.isdir(path):  # Path's own raises for a name that is too long
        return ""
    try:
        there = {n: f.shape for n, f in read_generation(path, select=_nothing).forms.items()}
    except CorruptError:
        return ""
    except (FileError, OSError) as error:
        return f"was there, but could not be read ({error})"
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if all(
        there.get(name) == here.get(name)
        for name in there.keys() | here.keys()
        if name.startswith(_MODEL) and not name.endswith(_EXTRA_STATE)
    ):
        return ""
    return (
        "was of another model; give each engine a folder of its own, since a load finds what was "
        "saved last"
    )


def _nothing(name: str) -> bool:
    return False


def load(engine: Engine, path: Path) -> dict[str, Any]:
    """Finds the newest good generation, or the one named, and puts it into the engine; the options
    of the optimizer as `Engine.load` says."""
    documents = restore(engine, find(engine, path))
    for told in engine.options.settle():
        if groups.is_main():
            log.warning("%s", told)
    return {n: each if n in _OWN else not_finite.read(each) for n, each in documents.items()}


def _check_model(path: Path, own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Of a module's extra state, which may be anything, the name is checked alone."""
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    shapes = [
        f"{name} is {tuple(saved[name].shape)} there and {tuple(own[name].shape)} here"
        for name in sorted(own.keys() & saved.keys())
        if not name.endswith(_EXTRA_STATE)
        and isinstance(own[name], torch.Tensor)
        and isinstance(saved[name], torch.Tensor)
        and own[name].shape != saved[name].shape
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


def _warn_of_buffers(loaded: checkpoint.Loaded) -> None:
    differ = sorted(loaded.documents.get("buffers", ()))
    if differ and not _same_ranks(loaded.documents) and groups.is_main():
        log.warning(
            "buffers that differed between the %d ranks that saved are rank 0's on all from here "
            "on: %s", len(loaded.documents["random"]), _some(differ),
        )  # fmt: skip
