"""Finds what made a loss or a gradient non-finite, by running the bad micro-batch again with hooks.

Costs nothing until it is needed: the hooks exist only during the second run. Compiled blocks run
eagerly there, so that every module can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lezero.core import groups
from lezero.nn.modes import uncompiled
from lezero.train.counting import Batch
from lezero.train.gradients import Sharded, wires_untouched
from lezero.train.randomness import seeded

if TYPE_CHECKING:
    from lezero.train.engine import Engine

UNREPEATED = "does not repeat"
SUMMED = "gradient, summed over the ranks,"


@dataclass(frozen=True)
class Culprit:
    """The first place where a value left the finite numbers."""

    module: str
    parameter: str
    where: str

    def __str__(self) -> str:
        parameter = f", parameter '{self.parameter}'" if self.parameter else ""
        return f"{self.where} of module '{self.module or '(the model)'}'{parameter}"


def vague(where: str) -> int:
    """0 for a place that is surely the cause, more for others."""
    return 2 * (UNREPEATED in where) + (SUMMED in where)


def find_on_all(engine: Engine, micros: list[Batch]) -> str:
    """What broke in a step of these micro-batches, on the first rank that finds something. Every
    rank calls it together."""
    together = isinstance(engine.gradients, Sharded)
    mine: Culprit | None = None
    for i, micro in enumerate(micros):
        if engine.count(micro) == 0 and not together:
            continue

        def run(micro: Batch = micro) -> torch.Tensor:
            with engine.precision.autocast():
                return engine.loss(engine.model, micro) * engine.precision.scale

        place = groups.rank() * len(micros) + i
        with seeded(engine.seed, engine.step, place), wires_untouched(engine.model):
            found = find_culprit(engine.model, run, together)
        if engine.count(micro) and (mine is None or vague(mine.where)):
            mine = found
        if not together and not vague(found.where):
            break
    texts = groups.gather_objects(str(mine) if mine else "")
    named = [f"{t}{f' (rank {r})' if len(texts) > 1 else ''}" for r, t in enumerate(texts) if t]
    return min(named or ["unknown place"], key=vague)


def find_culprit(
    model: nn.Module, run: Callable[[], torch.Tensor], together: bool = False
) -> Culprit:
    """Runs `run` (forward, returning the loss) and its backward once more and says what broke.

    `together`: the ranks exchange something in both, so each runs both whatever it finds; a bad
    gradient that is found in no backward of its own may then come from another rank.

    In order: a parameter that is not finite already; the first module whose output is not finite,
    or whose input is not (the batch's fault where no other module ran before it); the last module
    in forward order whose gradient is not finite, which is the first that backward reached. An
    output of -inf is what masks are made of, and counts only where the loss alone is not finite
    after it. The model's gradients are left empty.
    """
    found: list[Culprit] = []
    masks: list[Culprit] = []
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            module, _, short = name.rpartition(".")
            found.append(Culprit(module, short, "weights"))
            break
    if found and not together:
        return found[0]
    model.zero_grad(set_to_none=True)  # else every rank would see what one of them brought in
    try:
        with _hooked(model, found, masks), uncompiled():
            loss = run()
            if together or (not found and _finite(loss)):
                loss.backward()
        if found:
            return found[0]
        if not _finite(loss) and masks:
            return masks[0]
        if not _finite(loss):
            return Culprit("", "", "loss function (the model's output is finite), outside")
        return _bad_gradient(model, SUMMED if together else "gradient")
    except (
        Exception
    ) as error:  # hooks cannot look below vmap, for example: the step is skipped anyway
        why = f"place not found (the step run again ended in {type(error).__name__}),"
        return found[0] if found else Culprit("", "", why)
    finally:
        model.zero_grad(set_to_none=True)


def _bad_gradient(model: nn.Module, what: str) -> Culprit:
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            module, _, short = name.rpartition(".")
            return Culprit(module, short, what)
    return Culprit("", "", f"gradient (finite when run again: a fault that {UNREPEATED})")


@contextmanager
def _hooked(model: nn.Module, found: list[Culprit], masks: list[Culprit]) -> Iterator[None]:
    handles, ran = [], list[Owner]()
    for name, module in model.named_modules():
        hook = _output_hook(name, found, masks, ran)
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Owner = tuple[str, str]
"""A module that has parameters, and the first of them."""


def _output_hook(
    name: str, found: list[Culprit], masks: list[Culprit], ran: list[Owner]
) -> Callable[..., None]:
    """`ran`: the modules with parameters, in the order in which forward left them. `masks`: where
    an output held -inf.

    A module without any (a block adds what its parts returned) is between two that have some: its
    output came from the last one before it, the gradient there from the first one after it.
    """

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if found:
            return
        own = next((n for n, _ in module.named_parameters(recurse=False)), "")
        outputs, inputs = list(_tensors(output)), list(_tensors([args, kwargs]))
        finite = all(map(_finite, inputs))
        came = any(map(_spoils, inputs))
        if any(map(_spoils, outputs)) or (came and not all(map(_finite, outputs))):
            masked = "" if finite else ", with -inf in its input,"
            found.append(_blame(name, own, ran, came, f"output{masked}"))
            return
        if not all(map(_finite, outputs)):
            masks.append(_blame(name, own, ran, not finite, "output of -inf"))
        if own:
            ran.append((name, own))
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(_gradient_hook(name, own, found, ran, len(ran)))

    return hook


def _blame(name: str, own: str, ran: list[Owner], came: bool, output: str) -> Culprit:
    """Of a bad output. `came`: it came in with the input."""
    if came and not ran:  # with the batch
        return Culprit(name, "", "input")
    if not came and (own or not ran):
        return Culprit(name, own, output)
    side = "input" if came else "output"
    return Culprit(*ran[-1], f"{side} of '{name}', right after the output")


def _gradient_hook(
    name: str, own: str, found: list[Culprit], ran: list[Owner], place: int
) -> Callable[..., None]:
    """`place`: of the next module in `ran`."""

    def hook(gradient: torch.Tensor) -> None:
        if found or _finite(gradient):
            return
        if own or place >= len(ran):
            found.append(Culprit(name, own, "gradient at the output"))
        else:
            where = f"gradient at the input (the output of '{name}')"
            found.append(Culprit(*ran[place], where))

    return hook


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _spoils(tensor: torch.Tensor) -> bool:
    """Whether a value is no use to anyone: -inf is, in masks."""
    values = _values(tensor)
    if values is None or values.is_complex():
        return not _finite(tensor)
    return bool((values.isnan() | values.isposinf()).any())


def _finite(tensor: torch.Tensor) -> bool:
    values = _values(tensor)
    return values is None or bool(torch.isfinite(values).all())


def _values(tensor: Any) -> torch.Tensor | None:
    """The numbers of a tensor on this rank, in a type that torch can judge; None for others."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor
