"""The forecast: exact where it can be, nothing allocated, the right direction everywhere."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lezero.core import device, facts
from lezero.core.errors import CapacityError
from lezero.memory.pool import _libc
from lezero.models import Transformer, TransformerConfig
from lezero.ops.attention import available
from lezero.plan import Forecast, StepSpec, capacity, forecast, measure
from lezero.plan.calls import Call
from lezero.plan.forecast import STATED_ERROR, free_bytes, memory_of
from lezero.plan.measure import Timed
from lezero.plan.table import duration, render
from lezero.plan.trace import trace_step
from tests.leaks import own_cache

PLENTY = 1 << 50


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(own_cache(tmp_path)))


def tiny() -> Transformer:
    return Transformer(TransformerConfig(vocab=256, dim=64, layers=2, heads=4, context=64))


def llama_7b() -> Transformer:
    return Transformer(
        TransformerConfig(
            vocab=32000, dim=4096, layers=32, heads=32, ffn=11008, context=2048, tied=False
        )
    )


def foresee(
    build: Callable[[], nn.Module] = tiny,
    limit: int = PLENTY,
    budget_s: float = 0.0,
    **step: object,
) -> Forecast:
    """A forecast of a small step; it measures operations for `budget_s` seconds."""
    spec = StepSpec(**{"batch": 2, "tokens": 32, **step})  # type: ignore[arg-type]
    return forecast(build, spec, limit_bytes=limit, budget_s=budget_s)


@functools.cache
def foreseen(**step: object) -> Forecast:
    """The same of the tiny model, made once for all tests that read it."""
    return foresee(**step)  # type: ignore[arg-type]


def test_states_are_exact() -> None:
    model = tiny()
    numbers = sum(p.numel() for p in model.parameters())
    made = foreseen()
    assert made.parameters == numbers
    assert made.state_bytes["parameters"] == 4 * numbers
    assert made.state_bytes["gradients"] == 4 * numbers
    # two moments in fp32, and a step counter of 4 bytes for each parameter tensor
    assert made.state_bytes["optimizer"] == 8 * numbers + 4 * len(list(model.parameters()))
    assert made.memory_parts["parameters"] == 4 * numbers


def test_other_optimizers_are_counted_as_they_are() -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    assert foresee(optimizer=sgd).state_bytes["optimizer"] == 0


def test_parts_add_up_and_the_document_is_json() -> None:
    made = foresee(precision="bf16", steps=10)
    assert sum(made.memory_parts.values()) == made.memory_bytes
    assert sum(made.time_parts.values()) == pytest.approx(made.step_seconds)
    document = json.loads(json.dumps(made.to_dict()))
    assert document["memory_bytes"] == made.memory_bytes
    assert STATED_ERROR == {"memory": 0.10, "time": 0.25}
    assert document["stated_error"]["time"] == 0.25
    small = (32 << 20) / document["memory_bytes"]
    assert document["stated_error"]["memory"] == max(0.10, small)
    assert document["run_seconds"] == pytest.approx(10 * made.step_seconds)


def test_products_of_a_linear_layer_are_counted_exactly() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 16, bias=False)
            self.outer = nn.Linear(16, 8, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(tokens.float()))

    def inputs(batch: int, tokens: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.zeros(batch, 32), "targets": torch.zeros(batch, dtype=torch.int64)}

    # forward and weight gradients of both layers, input gradient of the outer one
    made = foresee(Linear, batch=64, inputs=inputs)
    assert made.flops == 2 * 64 * (2 * 32 * 16 + 3 * 16 * 8)


def test_memory_grows_with_batch_and_sequence() -> None:
    sizes = [made.memory_bytes for made in (foreseen(), foreseen(batch=8), foreseen(batch=32))]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert foresee(tokens=64, batch=32).memory_bytes > sizes[-1]


def test_memory_does_not_depend_on_how_often_is_accumulated() -> None:
    two, eight = foresee(accumulate=2), foresee(accumulate=8)
    assert two.memory_bytes == eight.memory_bytes
    assert eight.flops == 4 * two.flops
    assert eight.tokens_per_step == 4 * two.tokens_per_step


def test_accumulated_gradients_stand_beside_the_activations() -> None:
    once, often = foreseen(batch=32), foresee(batch=32, accumulate=2)
    gained = often.memory_parts["gradients"] - once.memory_parts["gradients"]
    assert gained == once.state_bytes["gradients"]


def test_work_and_time_grow_with_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time_call", lambda *_, **__: Timed(1e-3, True))
    once, often = (foresee(accumulate=count, budget_s=60.0) for count in (1, 5))
    assert often.flops == 5 * once.flops
    for phase in ("forward", "backward"):
        assert often.time_parts[phase] == pytest.approx(5 * once.time_parts[phase], rel=0.2)
    assert often.time_parts["update"] == pytest.approx(once.time_parts["update"])


def test_several_ranks_keep_their_buckets_and_send_them() -> None:
    alone, two = foreseen(), foresee(ranks=2)
    assert two.memory_parts["gradients"] >= alone.state_bytes["gradients"]
    seconds = alone.state_bytes["gradients"] / 1.2e9
    assert two.time_parts["communication"] == pytest.approx(seconds)
    assert two.flops == 2 * alone.flops
    assert two.tokens_per_step == 2 * alone.tokens_per_step


def test_half_precision_keeps_smaller_activations() -> None:
    fp32, bf16 = foreseen(batch=32), foresee(batch=32, precision="bf16")
    assert bf16.memory_parts["activations"] < fp32.memory_parts["activations"]
    assert bf16.state_bytes == fp32.state_bytes


@pytest.mark.skipif(not available(), reason="needs AVX512-BF16 and a compiler")
def test_the_step_is_priced_with_the_attention_kernel_that_it_will_use() -> None:
    def build() -> nn.Module:
        return Transformer(TransformerConfig(vocab=64, dim=64, layers=1, heads=2, context=64))

    named = {
        name: foresee(build, precision="bf16", attention=name, budget_s=60.0)
        for name in ("torch", "lezero")
    }
    assert {name: made.attention for name, made in named.items()} == {n: n for n in named}
    # fp32 attention is torch's, whatever is asked for
    assert foresee(build, attention="lezero").attention == "torch"
    # too few micro-batches to earn a trial of kernels back
    assert foresee(build, precision="bf16", steps=10).attention == "torch"


def test_the_random_generator_is_not_moved() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    foresee()
    assert torch.equal(torch.rand(4), expected)


def test_seven_billion_parameters_cost_no_memory_and_little_time() -> None:
    foreseen()  # loads what a forecast needs
    peak = _peak_of(lambda: _timed(llama_7b))
    assert peak < 500 << 20


def _timed(build: Callable[[], nn.Module]) -> None:
    begin = time.process_time()
    long = {"tokens": 2048, "batch": 1, "precision": "bf16", "attention": "torch"}
    with pytest.raises(CapacityError, match="does not fit"):
        foresee(build, limit=16 << 30, **long).require_fit()
    # processor time: other programs on this machine must not fail the test
    assert time.process_time() - begin < 20


def _peak_of(run: Callable[[], None]) -> int:
    """Bytes by which the resident peak grew during `run`."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def test_what_does_not_fit_says_what_would() -> None:
    small = foresee(batch=8, tokens=64, accumulate=8)
    limit = small.memory_bytes + (1 << 20)
    made = foresee(batch=32, tokens=64, accumulate=2, limit=limit)
    assert made.memory_bytes > limit
    assert not made.fits
    assert made.suggestions[0].startswith("train.accumulate=8 (micro-batches of 8;")
    with pytest.raises(CapacityError) as caught:
        made.require_fit()
    assert "does not fit" in str(caught.value)
    assert "train.accumulate=" in str(caught.value)
    assert caught.value.exit_status == 1


def test_what_is_suggested_comes_with_what_costs_least_first() -> None:
    spec = StepSpec(batch=1, tokens=256, ranks=2)
    assert [text for _, text in capacity._one_change_each(spec)] == [
        *("", "zero.stage=1", "zero.stage=2", "zero.stage=3", "train.precision=bf16"),
        *("train.pool=false", "data.sequence=128", "data.sequence=64"),
    ]
    half = capacity._one_change_each(spec.with_(precision="fp16"))  # which goes with no stage
    assert not any(text.startswith("zero") for _, text in half)


def test_a_model_too_large_for_any_batch_says_so() -> None:
    made = foresee(limit=1 << 20)
    assert made.suggestions == ()
    with pytest.raises(CapacityError, match="smaller model"):
        made.require_fit()


def test_what_fits_raises_nothing() -> None:
    made = foreseen()
    assert made.fits
    made.require_fit()


def test_measured_times_are_kept_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def steady(call: Call, neighbours: int = 1, place: str = "cpu") -> Timed:
        asked.append(call.key)
        product = "aten.mm" in call.key
        return Timed(1e-3, product, 20 << 20 if product else 0)

    monkeypatch.setattr(measure, "time_call", steady)
    first = foresee(budget_s=60.0)
    assert len(set(asked)) > 10
    assert all(asked.count(key) == 1 for key in asked if "aten.mm" in key)
    asked.clear()
    again = foresee(budget_s=60.0)
    assert again.step_seconds == first.step_seconds
    assert again.memory_parts["libraries"] == first.memory_parts["libraries"] > 20 << 20
    # what was disturbed is measured again, what was quiet is not
    assert asked
    assert not any("aten.mm" in key for key in asked)
    (file,) = tmp_path.glob("operations-*.json")
    whole = json.loads(file.read_text(encoding="utf-8"))
    lacking = json.dumps({key: value for key, value in whole.items() if key != "scratch"})
    endless = json.dumps({**whole, "scratch": {"a": float("inf")}})
    for damaged in ("{damaged", "[]", lacking, endless):
        file.write_text(damaged, encoding="utf-8")
        assert foresee(budget_s=60.0).step_seconds == first.step_seconds


def test_the_table_shows_parts_totals_and_the_stated_error() -> None:
    made = foreseen(steps=100)
    text = render(made)
    for word in ("parameters", "activations", "(±", "±25%", "tokens/s", "100 steps", "Fits."):
        assert word in text
    assert text.startswith(f"{made.parameters:,} parameters, "), "a small number is exact"
    wide = replace(made, stated_error={"memory": 1.25, "time": 0.25})
    assert "of a rank (at most 2.2 times as much)" in render(wide)
    assert render(replace(made, parameters=26_140_000)).startswith("26.1M parameters, ")
    lacking = foresee(limit=1 << 20)
    assert "Does not fit." in render(lacking)


def test_durations_are_readable() -> None:
    found = [duration(s) for s in (0.0031, 12.0, 250.0, 7500.0, 4e5)]
    assert found == ["3.1 ms", "12.00 s", "4 min 10 s", "2 h 05 min", "4.6 days"]


@pytest.mark.skipif(_libc() is None, reason="the heap is replayed with glibc only")
def test_the_pool_is_part_of_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    with_pool, without = foreseen(batch=32), foresee(batch=32, pool=False)
    assert "pool" in with_pool.memory_parts
    assert "allocator" in without.memory_parts
    replayed = []

    def resident_bytes(events: object, live: int, *, keep: bool, **_: object) -> int:
        replayed.append((keep, live))
        return live + 5

    trace, spec = trace_step(tiny, StepSpec(batch=2, tokens=32)), StepSpec(batch=2, tokens=32)
    monkeypatch.setattr(type(trace), "mapped_bytes", 100)  # which no heap holds
    monkeypatch.setitem(memory_of.__globals__, "resident_bytes", resident_bytes)
    for pool, name in ((True, "pool"), (False, "allocator")):
        assert memory_of(trace, spec.with_(pool=pool), {})[1][name] == 5
    heap = trace.peak()[0] - 100
    assert replayed == [(True, heap), (False, heap)]


def test_on_an_accelerator_only_what_lies_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StepSpec(batch=2, tokens=32, saves=True)
    trace = trace_step(tiny, spec)
    there = spec.with_(device="cuda")
    monkeypatch.setattr(device, "workspace_bytes", lambda: 64 << 20)
    monkeypatch.setattr(device, "memory_free", lambda: 5 << 30)
    _, host = memory_of(trace, spec, {})
    total, parts = memory_of(trace, there, {})
    state = trace.state_bytes
    assert host["checkpoint"] == state["parameters"] + state["optimizer"]
    assert parts.keys().isdisjoint({"checkpoint", "pool"})
    assert parts["libraries"] == 64 << 20
    assert total == sum(parts.values())
    assert free_bytes(there) == 5 << 30


def test_ranks_of_one_machine_share_the_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SimpleNamespace(available=12 << 30, limit=8 << 30)
    monkeypatch.setattr(facts, "memory", lambda: memory)
    spec = StepSpec(batch=1, tokens=1)
    assert free_bytes(spec) == 8 << 30
    assert free_bytes(spec.with_(ranks=4)) == 2 << 30
    assert free_bytes(spec.with_(ranks=4, ranks_here=2)) == 4 << 30
