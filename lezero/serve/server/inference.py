"""`/v1/infer`: tensors in, tensors out, as JSON or as safetensors.

JSON: {"inputs": {"NAME": nested lists}} gives {"outputs": {"NAME": nested lists}}. Safetensors: a
body with the inputs by name gives one with the outputs. The answer has the form that `Accept`
names, and otherwise the question's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.serve.batching.module import InferModule, Row
from lezero.serve.server.asked import check_model, shown, wrong
from lezero.serve.server.exchange import JSON, as_json, parse
from lezero.serve.server.problem import Problem

TENSORS = "application/vnd.safetensors"
_WEIGHT = re.compile(r"q\s*=\s*([01](?:\.\d{0,3})?)")
_LETTERS = 22
"""Of a number in JSON, with its comma."""
_PART = 1 << 12
"""Numbers that are Python's at once."""
_WHOLE = {
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}


def read_inputs(body: bytes, kind: str, model: InferModule, name: str) -> tuple[list[Row], bool]:
    """The rows of a body, and whether it was one row without a batch dim; `Problem` for others.
    name: of the model, for clients."""
    given = _from_tensors(body) if kind == TENSORS else _from_json(parse(body), model, name)
    try:
        return model.rows(given)
    except ConfigError as error:
        raise Problem(400, str(error), param="inputs") from None


def answer_kind(accept: str, asked: str) -> str:
    """The content type of the answer: of the two the one that `Accept` weighs most, of equal ones
    the first that it names, or the question's. (RFC 9110, 12.5.1.)

    Raises `Problem` (406) where it takes neither.
    """
    weights: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = (x.strip().lower() for x in part.split(";"))
        found = [x for x in map(_WEIGHT.fullmatch, parameters) if x is not None]
        if kind:
            weights[kind] = float(found[0][1]) if found else 1.0
    if not weights:
        return asked

    def weight(kind: str) -> float:
        return next((weights[x] for x in (kind, "application/*", "*/*") if x in weights), 0.0)

    best = max(*(x for x in weights if x in (JSON, TENSORS)), asked, JSON, TENSORS, key=weight)
    if weight(best) == 0:
        raise Problem(406, f"accept: got {accept[:80]!r}, this server gives {JSON} and {TENSORS}")
    return best


def answer_bytes(rows: Sequence[Row], kind: str) -> int:
    """What the outputs of rows take, and about the body that is made of them."""
    outputs = [x for row in rows for x in row.values()]
    own = sum(x.nbytes for x in outputs)
    return own + (own if kind == TENSORS else _LETTERS * sum(x.numel() for x in outputs))


def told_outputs(rows: Sequence[Row], is_single: bool, kind: str) -> bytes:
    """The body of an answer; `Problem` (500) for what JSON lacks, infinite and complex numbers, and
    for rows that cannot be put together."""
    for name, x in rows[0].items():
        if others := {tuple(row[name].shape) for row in rows} - {tuple(x.shape)}:
            problem = (
                f"rows of output {name} are {tuple(x.shape)} and {others.pop()}; ask one by one"
            )
            raise Problem(500, problem, code="model_error")
    if kind == TENSORS:
        from safetensors.torch import save

        found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return save({n: (x[0] if is_single else x).contiguous() for n, x in found.items()})
    if any(x.is_complex() for x in rows[0].values()):
        raise _not_in_json("complex numbers", "not_real")
    told = BytesIO()
    for name in rows[0]:
        told.write(b"%b%b:" % (b"," if told.tell() else b'{"outputs":{', as_json(name)))
        items = _items([row[name] for row in rows])
        told.writelines(items if is_single else _in_brackets(items))
    told.write(b"}}")
    return told.getvalue()


def _items(rows: list[Tensor] | Tensor) -> Iterator[bytes]:
    """Rows of equal shapes as JSON with commas between, few numbers at a time: Python's take many
    times their memory, and other threads wait for each part."""
    length = rows[0].numel()
    count = max(1, _PART // max(1, length))
    for first in range(0, len(rows), count):
        if first:
            yield b","
        if length > _PART:
            yield from _in_brackets(_items(rows[first]))
        else:
            some = rows[first : first + count]
            yield as_json(_listed(some if isinstance(some, Tensor) else torch.stack(some)))[1:-1]


def _in_brackets(items: Iterator[bytes]) -> Iterator[bytes]:
    yield b"["
    yield from items
    yield b"]"


def _listed(x: Tensor) -> Any:
    # Some operations lack numbers of 8 bits; Python's are of 64 anyway.
    wide = x.double() if x.is_floating_point() else x
    if not bool(wide.isfinite().all()):
        raise _not_in_json("infinite values", "not_finite")
    return wide.tolist()


def _not_in_json(what: str, code: str) -> Problem:
    return Problem(500, f"the answer holds {what}, which JSON lacks; accept {TENSORS}", code=code)


def _from_tensors(body: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(body)
    except KeyError as error:  # of the table of types
        problem = f"inputs: the body has a tensor of type {error}, which is not read here; send "
        raise Problem(400, f"{problem}another one", param="inputs") from None
    except (SafetensorError, ValueError, RuntimeError, TypeError) as error:
        said = str(error).partition("\n")[0]  # torch adds its own trace
        raise Problem(400, f"the body is no safetensors: {said}") from None


def _from_json(data: Mapping[str, Any], model: InferModule, own: str) -> dict[str, Tensor]:
    for name in data:
        if name not in ("inputs", "model"):
            raise wrong(name, "this server does not know it", code="unknown_parameter")
    check_model(data, own)
    inputs = data.get("inputs")
    if not isinstance(inputs, dict):
        inputs = {} if inputs is None else {_only(model, inputs): inputs}
    return {
        name: _tensor(value, model.example[name].dtype, name)
        for name, value in inputs.items()
        if name in model.example or _unknown(name, model)
    }


def _only(model: InferModule, given: Any) -> str:
    """The name of the one input, which need not be written."""
    first, *others = model.example
    if others:
        kind = {list: "a list", int: "a number", float: "a number"}.get(type(given))
        problem = f"got {kind or _NAMES[type(given)]}, needed is an object with {first}, "
        raise Problem(400, f"inputs: {problem}{', '.join(others)}", param="inputs")
    return first


def _unknown(name: str, model: InferModule) -> bool:
    problem = f"inputs.{name[:80]}: the model has {', '.join(model.example)}"
    raise Problem(400, problem, param="inputs")


def _tensor(value: Any, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor of nested lists, whose numbers must be of the kind of `dtype` and in its range:
    whole ones for whole types, and true and false for bool alone. Floating types round to nearest,
    by way of fp64 and, for those of 16 bits, of fp32.
    """
    numbers, shape = _flat(value, name)
    kinds, allowed = _allowed(dtype)
    other = set(map(type, numbers)) - kinds
    if other:
        given = " and ".join(sorted(_NAMES[kind] for kind in other))
        raise Problem(400, f"inputs.{name}: got {given}, allowed are {allowed}", param="inputs")

    def beyond(x: float) -> Problem:
        given = "a number beyond those of float64" if abs(x) == math.inf else shown(x)
        return Problem(400, f"inputs.{name}: got {given}, allowed are {allowed}", param="inputs")

    if dtype in _WHOLE and numbers:
        limits = torch.iinfo(dtype)
        for x in (min(numbers), max(numbers)):
            if not limits.min <= x <= limits.max:
                raise beyond(x)
    floats = dtype.is_floating_point
    try:
        wide = torch.tensor(
            numbers, dtype=torch.float64 if floats else dtype, device="cpu"
        ).reshape(shape)
    except OverflowError:  # a whole number beyond float64
        raise beyond(max(numbers, key=abs)) from None
    made = wide.to(dtype)
    # Of 8 bits, torch takes the largest number for one beyond it, and has few operations.
    if floats and not bool((made.double().isfinite() & (wide.abs() <= _nearest_most(dtype))).all()):
        raise beyond(max(numbers, key=abs))
    return made


def _allowed(dtype: torch.dtype) -> tuple[set[type], str]:
    """Python's types of what JSON may hold for `dtype`, and their name for people."""
    name = str(dtype).removeprefix("torch.")
    if dtype in _WHOLE:
        limits = torch.iinfo(dtype)
        return {int}, f"whole numbers of {name}, {limits.min} to {limits.max}"
    if dtype.is_floating_point:
        return {int, float}, f"numbers of {name}, to ±{torch.finfo(dtype).max:.6g}"
    return {bool}, "true and false"


def _nearest_most(dtype: torch.dtype) -> float:
    """The largest number of float64 that rounds to one of a floating type."""
    limits = torch.finfo(dtype)
    return float(limits.max * (1 + limits.eps / 4))


_NAMES = {
    bool: "true or false",
    int: "numbers",
    float: "numbers with a fraction or exponent",
    str: "text",
    dict: "an object",
    list: "a list beside numbers",
    type(None): "null",
}


def _flat(value: Any, name: str) -> tuple[list[Any], list[int]]:
    """What nested lists hold, in order, and their shape."""
    found, shape = [value], []
    while found and isinstance(found[0], list):
        if not all(isinstance(x, list) for x in found):
            raise _uneven(name, "numbers and lists side by side")
        lengths = set(map(len, found))
        if len(lengths) > 1:
            raise _uneven(name, f"lists of {min(lengths)} to {max(lengths)} side by side")
        shape.append(len(found[0]))
        found = list(chain.from_iterable(found))
    return found, shape


def _uneven(name: str, what: str) -> Problem:
    problem = (
        f"inputs.{name}: got {what}, allowed is one shape; ask for rows that differ one by one"
    )
    return Problem(400, problem, param="inputs")
