"""What invariance costs is measured and told, for programs that have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lezero.ops.decoder import native
from lezero.serve.invariance import ROWS, Cost, cost_lines, invariance_costs
from lezero.serve.llm import LLM
from tests.serve.models import small


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_products_are_timed_beside_torchs(weights: Any) -> None:
    if not native.NATIVE.available():
        pytest.skip("no kernels here")
    llm = LLM(small(), weights=weights)
    before = llm.generate([1, 2, 3])[0]
    costs = invariance_costs(llm.program)
    assert [cost.rows for cost in costs] == list(ROWS)
    for cost in costs:
        assert cost.seconds > 0
        assert cost.other_s > 0
        assert cost.other in ("torch fp32", "torch bf16")
    assert len(llm.generate([1, 2, 3])[0].tokens) == len(before.tokens)


def test_both_sides_go_through_the_same_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    from lezero.serve import invariance

    if not native.NATIVE.available():
        pytest.skip("no kernels here")
    program = LLM(small(), weights="int8").program
    seen: dict[str, list[tuple[int, ...]]] = {"ours": [], "torch": []}
    multiply, linear = invariance.multiply, torch.nn.functional.linear
    of_prompts = set[int]()

    def ours(x: Any, weight: Any, rounded: bool) -> Any:
        seen["ours"].append((len(x), weight.out_features, weight.in_features))
        of_prompts.update([len(x)] if rounded else [])
        return multiply(x, weight, rounded)

    def theirs(x: Any, weight: Any) -> Any:
        seen["torch"].append((len(x), *weight.shape))
        return linear(x, weight)

    monkeypatch.setattr(invariance, "multiply", ours)
    monkeypatch.setattr(torch.nn.functional, "linear", theirs)
    monkeypatch.setattr(invariance, "cpu", lambda: type("", (), {"native_bf16": False}))
    assert invariance_costs(program)
    assert seen["ours"] == seen["torch"]
    assert {rows for rows, *_ in seen["ours"]} == set(ROWS)
    assert of_prompts == ({max(ROWS)} if program.prompts_apart else set())


def test_where_it_costs_time_is_said() -> None:
    costs = [Cost(1, 1.0, 2.0, "torch fp32"), Cost(256, 3.0, 2.0, "torch bf16")]
    first, second = cost_lines(costs)
    assert "0.50 for 1 row (torch fp32), 1.50 for 256 rows (torch bf16)" in first
    assert "costs time for 256 rows" in second
    assert "no cost" in cost_lines(costs[:1])[1]
    every = [Cost(rows, 3.0, 2.0, "torch fp32") for rows in ROWS]
    assert cost_lines(every)[1].endswith("so it costs time for 1 row, 16 rows, 256 rows")


def test_a_program_without_invariance_says_so() -> None:
    plain = LLM(small(), weights="fp32")
    assert invariance_costs(plain.program) == cost_lines([]) == []
    said = [line for line in plain.forecast.lines() if line.startswith("invariance")]
    assert said == ["invariance  none: beside others an answer's last bits may differ"]
    if native.NATIVE.available():
        assert "invariance" not in " ".join(LLM(small()).forecast.lines())
