"""Groups: what a field allows, and what a layer's inputs do."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import lezero as lz


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (lz.Int4Weight, r"…\) or 'row' \("),
        (lz.Int8WeightActivation, r"…\) or 'row' \("),
        (lz.Int8Weight, r"…\), 'row' or 'tensor' \("),
        (lz.Fp8, r"…\), 'row' or 'tensor' \("),
    ],
)
def test_groups_that_a_field_takes_are_named(kind: Any, words: str) -> None:
    with pytest.raises(lz.ConfigError, match=rf"group: allowed are multiples of 32 .*{words}"):
        kind(group=4)
    for group in ("row", "tensor") if "tensor" in words else ("row",):
        assert kind(group=group).group == group


@pytest.mark.parametrize(
    ("inputs", "group", "words", "allowed"),
    [
        (4, 32, r"no multiple of 32 does\. Give 'row', or leave the layer out", ["row"]),
        (96, 64, r"32, 96 do\. Give one that divides, or leave the layer out", [32, 96]),
    ],
)
@pytest.mark.parametrize("kind", [lz.Fp8, lz.Int8Weight, lz.Int8WeightActivation, lz.Int4Weight])
def test_what_a_layers_error_names_is_allowed(
    kind: Any, inputs: int, group: int, words: str, allowed: list[Any]
) -> None:
    with pytest.raises(lz.ConfigError, match=rf"the {inputs} inputs of '0'; {words}"):
        lz.quantize_(nn.Sequential(nn.Linear(inputs, 64)), kind(group=group), objective="size")
    for other in allowed:
        lz.quantize_(nn.Sequential(nn.Linear(inputs, 64)), kind(group=other), objective="size")


def test_nf4_takes_any_that_divides() -> None:
    with pytest.raises(lz.ConfigError, match=r"the 20 inputs of '0'; 2, 4, 5, 10, 20 do\."):
        lz.quantize_(nn.Sequential(nn.Linear(20, 64)), lz.Nf4(group=64), objective="size")
    lz.quantize_(nn.Sequential(nn.Linear(20, 64)), lz.Nf4(group=5), objective="size")
