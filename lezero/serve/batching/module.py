"""Any module with an example input: rows in, rows out, batched along dim 0.

A row's answer is the module's own on that row alone but for rounding, since products of more rows
may add in another order. A module whose rows see each other (batch statistics, attention over the
batch) is found at the start and refused.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lezero.core import device
from lezero.core.errors import ConfigError
from lezero.core.first_calls import settle_first_calls
from lezero.core.log import logger
from lezero.serve.batching.independence import Row, check_rows, compare
from lezero.serve.batching.model import COUNTS, BatchedModel

_FORM = "PACKAGE.MODULE:FUNCTION"
_LOG = logger("serve")
_MOST_ROWS = 2048
"""Of a request: each of them takes memory of its own, however short it is."""
_SHOWN, _LETTERS = 5, 80
"""Names that an error tells of what a client gave, and letters of each, or of a shape."""


class InferModule(BatchedModel):
    """A module behind `/v1/infer`.

    example: inputs of one call: a tensor, a tuple of positional or a mapping of keyword arguments;
    dim 0 of each is the batch, and a step's inputs are put on the example's device. largest: inputs
    of the same kind; dims that differ from the example's may have any size from 1 up to it. Without
    it only the batch may differ.

    Outputs in mappings, lists and tuples have dotted names, such as hidden.0; None is no output. A
    warning names what is left out since it is no tensor.

    Errors: `ConfigError` for inputs without a batch dim, and a module that fails on the example,
    whose outputs have no batch dim, or whose rows see each other.
    """

    is_users = True

    def __init__(self, module: nn.Module, example: Any, largest: Any = None) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module: got a {type(module).__name__}, allowed is an nn.Module")
        settle_first_calls()
        self._module = module
        _to_answer(module)
        self._left_out: set[str] = set()
        self._positional = not isinstance(example, Mapping)
        self.example = _named(example, "example")
        self.largest = self.example if largest is None else _named(largest, "largest")
        _check_forms(self.example, self.largest)
        self._size = sum(x[0].numel() for x in self.example.values())
        count = min(map(len, self.example.values()))
        rows = [{name: x[i] for name, x in self.example.items()} for i in range(count)]
        own = device.places(module)
        self._registers = bool(own)
        self._devices = {x.type for x in (*own, *(x.device for x in rows[0].values()))}
        check_rows(self.run, rows, self._coarseness, self._runs_on_cpu)
        self.on_cpu = self._runs_on_cpu()
        shapes = ", ".join(f"{k} {self.shape_text(k)}" for k in self.example)
        self.description = f"{type(module).__name__} of {shapes}"

    def _runs_on_cpu(self) -> bool:
        """Once it has run: a wrapper may hold its module where torch does not look, in a list for
        example, and then the outputs tell of it, or that an accelerator is in use."""
        hides = not self._registers and device.is_initialized()
        return self._devices == {"cpu"} and not hides

    def shape_text(self, name: str) -> str:
        """The shape of a row, as "float32 (3, 1–224)"."""
        least, most = self.example[name].shape[1:], self.largest[name].shape[1:]
        sizes = [str(b) if a == b else f"1–{b}" for a, b in zip(least, most, strict=True)]
        return f"{str(self.example[name].dtype).removeprefix('torch.')} ({', '.join(sizes)})"

    def rows(self, inputs: Mapping[str, Tensor]) -> tuple[list[Row], bool]:
        """The rows of a request, and whether it was one row without a batch dim.

        Raises `ConfigError` that names the input whose type or shape is not the example's, and for
        more than 2,048 rows.
        """
        if set(inputs) != set(self.example):
            wanted = ", ".join(self.example)
            raise ConfigError(f"inputs: got {_some(inputs) or 'none'}, needed are {wanted}")
        ranks = {name: x.dim() - self.example[name].dim() for name, x in inputs.items()}
        if set(ranks.values()) not in ({0}, {-1}):
            raise ConfigError(self._wrong(inputs))
        is_single = -1 in ranks.values()
        # In the example's order, whatever the client's was: rows of one kind have equal shapes.
        whole = {x: inputs[x][None] if is_single else inputs[x] for x in self.example}
        counts = {len(x) for x in whole.values()}
        if len(counts) != 1 or 0 in counts:
            raise ConfigError(f"inputs: have {sorted(counts)} rows, allowed is one number above 0")
        count = counts.pop()
        if count > _MOST_ROWS:
            raise ConfigError(f"inputs: got {count} rows, allowed are 1 to {_MOST_ROWS} a request")
        for name, x in whole.items():
            small, large = self.example[name].shape[1:], self.largest[name].shape[1:]
            sizes = zip(x.shape[1:], small, large, strict=True)
            fits = all(n == a or (a != b and 1 <= n <= b) for n, a, b in sizes)
            if not fits or x.dtype != self.example[name].dtype:
                raise ConfigError(self._wrong({name: inputs[name]}))
        return [{name: x[i] for name, x in whole.items()} for i in range(count)], is_single

    def _wrong(self, inputs: Mapping[str, Tensor]) -> str:
        found = [
            f"inputs.{name}: got {str(x.dtype).removeprefix('torch.')} "
            f"{_cut(str(tuple(x.shape)))}, allowed is {self.shape_text(name)}, with or without a "
            "batch dim before"
            for name, x in inputs.items()
        ]
        return "; ".join(found)

    def kind(self, item: Row) -> Hashable:
        return tuple(tuple(x.shape) for x in item.values())

    def work(self, item: Row) -> float:
        return sum(x.numel() for x in item.values()) / max(1, self._size)

    @torch.inference_mode()
    def run(self, items: Sequence[Row]) -> Sequence[Row]:
        """The outputs of each row, by name."""
        together = {
            name: torch.stack([x[name] for x in items]).to(example.device)
            for name, example in self.example.items()
        }
        found = self._call(together)
        for name, output in found.items():
            if output.dim() == 0 or len(output) != len(items):
                shape = tuple(output.shape)
                problem = f"output {name}: dim 0 of {shape} is not the batch; give it one per row"
                raise ConfigError(f"{problem}, or leave it out")
        return [{name: x[i] for name, x in found.items()} for i in range(len(items))]

    def is_sound(self, answer: Row) -> bool:
        return not any(x.isnan().any() for x in answer.values())

    def samples(self) -> Iterator[list[Row]]:
        row = {name: x[0] for name, x in self.example.items()}
        for count in COUNTS:
            yield [row] * count

    def unlike(self, alone: Row, answers: Sequence[Row]) -> str:
        try:
            for beside in answers:
                compare(alone, beside, self._coarseness)
        except ConfigError as error:
            return str(error)
        return ""

    def _call(self, inputs: Row) -> Row:
        given = inputs.values()
        found = self._module(*given) if self._positional else self._module(**inputs)
        outputs = _outputs(found)
        # In memory of its own: a module may give out a buffer that the next step writes to.
        tensors = {name: x for name, x in outputs.items() if isinstance(x, Tensor)}
        self._devices.update(x.device.type for x in tensors.values())
        kept = {name: x.to("cpu", copy=True) for name, x in tensors.items()}
        if not kept:
            raise ConfigError(
                f"module: gives a {type(found).__name__}, in which no tensor is found; return a "
                "tensor, mapping, list or tuple of them"
            )
        for name, x in kept.items():
            if x.layout is not torch.strided:
                raise ConfigError(
                    f"output {name}: got the layout {str(x.layout).removeprefix('torch.')}, "
                    "allowed are dense tensors; return x.to_dense()"
                )
            if x.is_complex() and x.dtype != torch.complex64:  # safetensors has no other
                kind = str(x.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"output {name}: got {kind}, allowed are real types and complex64"
                )
        for name in outputs.keys() - kept.keys() - self._left_out:
            self._left_out.add(name)
            kind = type(outputs[name]).__name__
            _LOG.warning("output %s is left out of answers: %s is no tensor", name, kind)
        return kept

    @property
    def _coarseness(self) -> float:
        kinds = {x.dtype for x in self._module.parameters() if x.is_floating_point()}
        # Weights of 8 bits are only kept so.
        return max((torch.finfo(x).eps for x in kinds if x.itemsize > 1), default=0.0)


def module_of(words: str) -> InferModule:
    """The module of "PACKAGE.MODULE:FUNCTION": the function gives (module, example) or (module,
    example, largest). This imports and runs that code, as the user asked; it is looked for in the
    working folder first, as `python -m` does, and a module that is imported already stays.

    Raises `ConfigError` for what cannot be imported, fails, or gives something else.
    """
    place, _, name = words.partition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f"module: got {words!r}, allowed is {_FORM}")
    here = os.getcwd()
    if not sys.path or sys.path[0] not in ("", here):
        sys.path.insert(0, here)
    was_there = place in sys.modules
    try:
        found = importlib.import_module(place)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"module: {words!r} cannot be imported ({problem})") from error
    file = getattr(found, "__file__", None) or "a module within Python"
    if was_there:
        file = f"{file}, which was imported already"
    factory = getattr(found, name, None)
    if factory is None:
        raise ConfigError(f"module: {words!r} cannot be imported: no {name} in {file}")
    try:
        made = factory()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"module: {words} of {file} failed ({problem})") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ConfigError(f"module: {words} of {file} must give (module, example) or (…, largest)")
    return InferModule(*made)


def _to_answer(module: nn.Module) -> None:
    """Puts a module in eval mode. An exported program has its mode baked in and refuses another;
    it stays as it is, but what is beside it in a module that holds it goes along."""
    try:
        module.eval()
    except NotImplementedError:
        for inner in module.children():
            _to_answer(inner)


def _named(given: Any, what: str) -> Row:
    if isinstance(given, Tensor):
        given = {"input": given}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        given = {f"input_{i}": x for i, x in enumerate(given)}
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"{what}: got {type(given).__name__}, allowed are tensors")
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dim() == 0 or 0 in x.shape or x.is_complex():
            raise ConfigError(f"{what}.{name}: allowed is a real tensor with a batch in dim 0")
    return {str(name): x.detach() for name, x in given.items()}


def _some(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(map(_cut, every[:_SHOWN])) + more


def _cut(text: str) -> str:
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]}…"


def _check_forms(example: Row, largest: Row) -> None:
    forms = [{k: (x.dtype, x.dim()) for k, x in rows.items()} for rows in (example, largest)]
    if forms[0] != forms[1]:
        raise ConfigError("largest: must have the example's names, types and dims")
    for name, x in example.items():
        one, most = tuple(x.shape[1:]), tuple(largest[name].shape[1:])
        if any(size > bound for size, bound in zip(one, most, strict=True)):
            raise ConfigError(
                f"largest: a row of {name} is {most}, and the example's is {one}: give one that is "
                "no smaller in any dim"
            )


def _outputs(found: Any) -> dict[str, Any]:
    """What a module gives but None, by name."""
    named: dict[str, Any] = {}
    if isinstance(found, Mapping):
        _flatten(found.items(), "", named)
    elif isinstance(found, list | tuple):
        _flatten(((f"output_{i}", x) for i, x in enumerate(found)), "", named)
    else:
        named["output"] = found
    return named


def _flatten(pairs: Iterable[tuple[Any, Any]], before: str, named: dict[str, Any]) -> None:
    for key, x in pairs:
        name = f"{before}{key}"
        if isinstance(x, Mapping):
            _flatten(x.items(), f"{name}.", named)
        elif isinstance(x, list | tuple):
            _flatten(enumerate(x), f"{name}.", named)
        elif x is not None:
            if name in named:
                raise ConfigError(f"module: gives two outputs that are called {name}; rename one")
            named[name] = x
