"""Ranks that quantize one model begin alike, or none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import speed
from lezero.compress.quantize.modules import quantized_layers
from lezero.core import groups
from tests.ranks import RankPool

CASES: dict[str, tuple[str, str]] = {
    "data": ("ConfigError: data: rank 1 gives another data", "data: rank 1 gives another data"),
    "shapes": ("ConfigError: data: rank 1 gives another", "data: rank 1 gives another data"),
    "weights": ("ConfigError: model: rank 1 gives another", "model: rank 1 gives another model"),
    "buffers": ("ConfigError: model: rank 1 gives another", "model: rank 1 gives another model"),
    "metric": ("ConfigError: config: rank 1 gives another", "config: rank 1 gives another"),
    "layers": ("ConfigError: config: rank 1 gives another", "config: rank 1 gives another"),
    "scheme": ("ConfigError: config: rank 1 gives another", "config: rank 1 gives another"),
    "nan": ("NumericsError: rank 1: lz.quantize_: 1 of", "NumericsError: lz.quantize_: 1 of"),
    "filter": ("NumericsError: rank 1: lz.quantize_: no layer", "lz.quantize_: no layer fits"),
    "no data": ("NumericsError: rank 1: data: ", "ConfigError: data: "),
}


def told(case: str) -> tuple[str, bool]:
    """What a rank hears, and whether its model is as it was."""
    torch.set_num_threads(1)
    speed._MOST_RUNS = 1
    torch.manual_seed(0)
    other = groups.rank() == 1
    layers = 3 if case == "layers" and other else 2
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    odd = torch.randn(4 * 64 + 1).bfloat16()[1:]  # begins between two words
    data: Any = odd.view(4, 64).float() if case else (odd.view(4, 64),)
    model = model if case else model.bfloat16()
    given: dict[str, Any] = {"objective": "size"}
    scheme: Any = lz.Int8Weight()
    if other and case == "data":
        data = data.flip(1)
    elif other and case == "shapes":
        data = data[:3]
    elif other and case == "weights":
        model[1].weight.data[0, 0] += 1
    elif other and case == "buffers":
        model.register_buffer("seen", torch.ones(3))
    elif other and case == "metric":
        given["metric"] = lambda model: 1.0
    elif other and case == "scheme":
        scheme = lz.Int4Weight(group=32)
    elif other and case == "nan":
        model[0].weight.data[0, 0] = torch.nan
    elif other and case == "filter":
        given["filter"] = "nothing*"
    elif other and case == "no data":
        data = []
    before = [x.clone() for x in model.parameters()]
    try:
        lz.quantize_(model, scheme, data=data, **given)
    except lz.LeZeroError as error:
        left = [
            torch.equal(one.nan_to_num(7), two.nan_to_num(7))
            for one, two in zip(before, model.parameters(), strict=True)
        ]
        return f"{type(error).__name__}: {error}", all(left)
    return "", False


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_differ_are_told_at_once(case: str, ranks: RankPool) -> None:
    found = ranks(2, told, case)
    for (said, left), wanted in zip(found, CASES[case], strict=True):
        assert wanted in said
        assert left


def alone() -> int:
    model = nn.Sequential(nn.Linear(64, 64))
    if groups.rank() == 0:
        lz.quantize_(model, lz.Int8Weight(), objective="size")
    return len(quantized_layers(model))


def test_one_rank_may_quantize_where_nothing_is_measured(ranks: RankPool) -> None:
    assert ranks(2, alone) == [1, 0]


def test_ranks_that_do_not_are_not(ranks: RankPool) -> None:
    assert ranks(2, told, "") == [("", False)] * 2
