"""The fp32 masters that LeZero's optimizers keep of weights in bf16, in what was saved of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lezero.checkpoint.inner_optimizers import inner_prefix, outer_name
from lezero.checkpoint.shared_state import in_file
from lezero.core.errors import FileError
from lezero.ops.adamw import reference

MASTERS = ("master", "remainder")
"""What the state is called that makes a weight exact."""
_OF_LEZERO = ("AdamW", "AdamW8bit")
"""Classes that keep them; torch has one of the first name, which does not."""


def names_of_masters(names: Iterable[str], prefix: str = "optimizer/") -> dict[str, str]:
    """The tensor that makes each parameter exact, by the parameter's name; of optimizers inside of
    the optimizer, too."""
    found: dict[str, str] = {}
    for name in names:
        parameter, _, key = outer_name(name, prefix).rpartition("/")
        if key in MASTERS and parameter.startswith(prefix):
            found.setdefault(parameter.removeprefix(prefix), name)
    return found


def weights_of_masters(
    parameters: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    prefix: str = "optimizer/",
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The exact weights, by name, of parameters in fp32 that LeZero's optimizers trained in bf16
    with masters; and `tensors` and `document` without those masters, which have done their work.

    `weights` are those that were saved, by name.
    """
    exact: dict[str, Tensor] = {}
    left = dict(tensors)
    record = _taken(parameters, weights, left, exact, document, prefix)
    if document.get("inner"):
        record["inner"] = {
            where: _taken(parameters, weights, left, exact, each, inner_prefix(prefix, where))
            for where, each in document["inner"].items()
        }
    return exact, left, record


def _taken(
    parameters: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    left: dict[str, Tensor],
    exact: dict[str, Tensor],
    document: Mapping[str, Any],
    prefix: str,
) -> dict[str, Any]:
    """One optimizer's record without its masters, which go from `left` into `exact`."""
    entries = dict(document["parameters"])
    if document["class"] not in _OF_LEZERO:
        return dict(document)
    for name, parameter in parameters.items():
        kept = entries.get(name, {}).get("state", {})
        key = next((key for key in MASTERS if in_file(kept.get(key))), None)
        if key is None or parameter.dtype != torch.float32:
            continue
        weight, extra = weights.get(name), left.get(f"{prefix}{name}/{key}")
        if weight is None or extra is None or weight.dtype != torch.bfloat16:
            continue
        if extra.dtype != (torch.int16 if key == "remainder" else torch.float32):
            continue
        if weight.shape != extra.shape:
            raise FileError(
                f"parameter '{name}' was saved as {tuple(weight.shape)} and its {key} as "
                f"{tuple(extra.shape)}"
            )
        exact[name] = reference.read(weight, left.pop(f"{prefix}{name}/{key}"))
        state = {other: value for other, value in kept.items() if other != key}
        entries[name] = {**entries[name], "state": state}
    return {**document, "parameters": entries}
