"""`/v1/infer`: tensors in, tensors out, as JSON or as safetensors.

JSON: {"inputs": {"NAME": nested lists}} gives {"outputs": {"NAME": nested lists}}. Safetensors: a
body with the inputs by name gives one with the outputs. The answer has the form that `Accept`
names, and otherwise the question's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.serve.batching.module import InferModule, Row
from lezero.serve.server.exchange import JSON, as_json_in_parts, parse
from lezero.serve.server.problem import Problem

TENSORS = "application/vnd.safetensors"
_WHOLE = {
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}


def read_inputs(body: bytes, kind: str, model: InferModule) -> tuple[list[Row], bool]:
    """The rows of a body, and whether it was one row without a batch dim; `Problem` for others."""
    given = _from_tensors(body) if kind == TENSORS else _from_json(parse(body), model)
    try:
        return model.rows(given)
    except ConfigError as error:
        raise Problem(400, str(error), param="inputs") from None


def answer_kind(accept: str, asked: str) -> str:
    """The content type of the answer: the first of the two that `Accept` names, or the question's.

    Raises `Problem` (406) where it takes neither.
    """
    named = [part.partition(";")[0].strip().lower() for part in accept.split(",") if part.strip()]
    for name in named:
        if name in (JSON, TENSORS):
            return name
    if not named or {"*/*", "application/*"} & set(named):
        return asked
    raise Problem(406, f"accept: got {accept[:80]!r}, this server gives {JSON} and {TENSORS}")


def told_outputs(rows: Sequence[Row], is_single: bool, kind: str) -> bytes:
    """The body of an answer; `Problem` (500) for what JSON lacks: infinite and complex numbers."""
    found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    found = {name: x[0] if is_single else x for name, x in found.items()}
    if kind == TENSORS:
        from safetensors.torch import save

        return save({name: x.contiguous() for name, x in found.items()})
    if any(x.is_complex() for x in found.values()):
        raise _not_in_json("complex numbers", "not_real")
    # Some operations lack numbers of 8 bits; Python's are of 64 anyway.
    found = {name: x.double() if x.is_floating_point() else x for name, x in found.items()}
    if not all(bool(x.isfinite().all()) for x in found.values()):
        raise _not_in_json("infinite values", "not_finite")
    return as_json_in_parts({"outputs": {name: _listed(x) for name, x in found.items()}})


def _listed(x: Tensor) -> Any:
    return [row.tolist() for row in x] if x.dim() else x.item()


def _not_in_json(what: str, code: str) -> Problem:
    return Problem(500, f"the answer holds {what}, which JSON lacks; accept {TENSORS}", code=code)


def _from_tensors(body: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(body)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise Problem(400, f"the body is no safetensors: {error}") from None


def _from_json(data: Mapping[str, Any], model: InferModule) -> dict[str, Tensor]:
    for name in data:
        if name not in ("inputs", "model"):
            shown = name[:80]
            raise Problem(400, f"{shown}: this server does not know it", param=shown)
    inputs = data.get("inputs")
    if not isinstance(inputs, dict):
        inputs = {} if inputs is None else {next(iter(model.example)): inputs}
    return {
        name: _tensor(value, model.example[name].dtype, name)
        for name, value in inputs.items()
        if name in model.example or _unknown(name, model)
    }


def _unknown(name: str, model: InferModule) -> bool:
    problem = f"inputs.{name[:80]}: the model has {', '.join(model.example)}"
    raise Problem(400, problem, param="inputs")


def _tensor(value: Any, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor of nested lists, whose numbers must be of the kind of `dtype`, none rounded away."""
    wrong = f"inputs.{name}: "
    try:
        found = torch.tensor(value, dtype=torch.float64 if _is_floating(dtype) else None)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        text = str(error).splitlines()[0][:200]
        raise Problem(400, f"{wrong}no tensor ({text})", param="inputs") from None
    kind = "true and false" if dtype == torch.bool else "whole numbers"
    if dtype in _WHOLE:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        whole = found.dtype == torch.int64
        if not whole or (
            found.numel() and not least <= int(found.min()) <= int(found.max()) <= most
        ):
            raise Problem(400, f"{wrong}allowed are {kind} of {dtype}", param="inputs")
    elif dtype == torch.bool and found.dtype != torch.bool:
        raise Problem(400, f"{wrong}allowed are {kind}", param="inputs")
    made = found.to(dtype)
    if _is_floating(dtype) and not math.isfinite(float(made.double().abs().sum())):
        raise Problem(400, f"{wrong}holds numbers that {dtype} lacks", param="inputs")
    return made


def _is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point
