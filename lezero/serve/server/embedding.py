"""OpenAI's `/v1/embeddings`: what is asked for, and the answer."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lezero.serve.server.asked import check_model, is_whole, shown, truth, wrong
from lezero.serve.server.exchange import as_json
from lezero.serve.server.problem import Problem

_KNOWN = {"model", "input", "encoding_format", "dimensions", "truncate", "user"}
_MOST = 2048
_LETTERS = 22
"""Of a number of fp32 in JSON, with its comma."""


@dataclass(frozen=True)
class Embeddings:
    """inputs: texts or tokens. base64: vectors as bytes of fp32, little-endian. truncate: whether
    what is too long is cut off instead of refused. dimensions: that vectors are to have."""

    inputs: list[str | list[int]]
    base64: bool
    truncate: bool
    dimensions: int | None

    def answer_bytes(self, dim: int) -> int:
        """About what vectors of so many numbers take, and the body that holds them."""
        return len(self.inputs) * dim * (4 + (6 if self.base64 else _LETTERS))


def read_embeddings(data: Mapping[str, Any], model: str, dim: int | None) -> Embeddings:
    """Checks every field; raises `Problem` that names the one that is wrong. dim: of the vectors,
    where it is known."""
    given = {key: value for key, value in data.items() if value is not None}
    for name in given:
        if name not in _KNOWN:
            raise wrong(name, "this server does not know it", code="unknown_parameter")
    check_model(given, model)
    form = given.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise wrong("encoding_format", f"got {shown(form)}, allowed are float and base64")
    wanted = given.get("dimensions")
    if wanted is not None and (not is_whole(wanted) or dim not in (None, wanted)):
        raise _of_length(wanted, dim)
    inputs = _inputs(given.get("input"))
    return Embeddings(inputs, form == "base64", truth(given, "truncate"), wanted)


def _of_length(wanted: Any, dim: int | None) -> Problem:
    length = "the length of the model's vectors" if dim is None else dim
    return wrong("dimensions", f"got {shown(wanted)}, allowed is {length}")


def _inputs(value: Any) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(map(is_whole, value)):
        return [value]
    if not isinstance(value, list) or not 1 <= len(value) <= _MOST:
        given = f"got {len(value)} texts; " if isinstance(value, list) else ""
        raise wrong("input", f"{given}required: text, 1 to {_MOST} texts, or tokens")
    for number, item in enumerate(value):
        tokens = isinstance(item, list) and item and all(map(is_whole, item))
        if not isinstance(item, str) and not tokens:
            raise wrong("input", f"item {number} is neither text nor a list of tokens")
    return value


def told_embeddings(vectors: Sequence[Tensor], asked: Embeddings, model: str, tokens: int) -> bytes:
    """The answer's JSON. vectors: (D,) each, in the order of the inputs.

    Raises `Problem` for vectors of another length than was asked for.
    """
    if asked.dimensions not in (None, len(vectors[0])):
        raise _of_length(asked.dimensions, len(vectors[0]))
    form = _bytes if asked.base64 else _floats
    # One by one: Python's floats take eight times as many bytes, and other threads wait for each.
    data = b",".join(
        as_json({"object": "embedding", "index": i, "embedding": form(x)})
        for i, x in enumerate(vectors)
    )
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rest = as_json({"model": model, "usage": usage}).removeprefix(b"{")
    return b'{"object":"list","data":[%b],%b' % (data, rest)


def _floats(x_D: Tensor) -> list[float]:
    found: list[float] = x_D.tolist()
    return found


def _bytes(x_D: Tensor) -> str:
    return base64.b64encode(x_D.float().numpy().astype("<f4").tobytes()).decode()
