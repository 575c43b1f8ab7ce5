"""A step on fake tensors against the same step on real ones."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lezero.core.errors import ConfigError
from lezero.plan.calls import TensorFact
from lezero.plan.spec import StepSpec
from lezero.plan.trace import trace_step


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(tokens)))


def spec(**changes: object) -> StepSpec:
    return StepSpec(**{"batch": 4, "tokens": 8, **changes})  # type: ignore[arg-type]


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_products_are_those_of_a_real_step(precision: str) -> None:
    trace = trace_step(Small, spec(precision=precision))
    found: dict[str, int] = {}
    for phase, counts in trace.counts.items():
        for key, count in counts.items():
            if not phase.startswith("update"):
                name = key.split("(", 1)[0]
                found[name] = found.get(name, 0) + count
    model, step = Small(), spec(precision=precision)
    with Names() as seen:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = step.mean_loss(model, step.make_batch())
        loss.backward()
    for name in ("aten.mm.default", "aten.addmm.default", "aten.tanh.default"):
        assert found.get(name, 0) == seen.names.count(name)


def test_every_block_that_is_freed_was_allocated_and_steps_repeat_cleanly() -> None:
    trace = trace_step(Small, spec(accumulate=2))
    live: set[int] = set()
    for block, size in trace.steps(6):
        if size < 0:
            live.remove(block)
        else:
            assert block not in live
            live.add(block)
    parameters_and_states = 3 * len(list(Small().parameters())) * 2
    assert len(live) <= parameters_and_states


def test_the_peak_divides_into_kinds() -> None:
    trace = trace_step(Small, spec(batch=64))
    peak, parts = trace.peak()
    assert peak == sum(parts.values())
    assert parts["parameters"] == trace.state_bytes["parameters"]
    assert parts["optimizer"] == trace.state_bytes["optimizer"]


def test_an_expanded_tensor_is_read_once() -> None:
    assert TensorFact((4, 1000), (0, 1), torch.float32).bytes == 4000


@pytest.mark.parametrize("debug", [False, True])
def test_only_debug_shows_what_torch_logs_of_a_step_that_cannot_run(monkeypatch, debug) -> None:
    monkeypatch.setenv("LEZERO_DEBUG", str(int(debug)))
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with pytest.raises(ConfigError, match="no forecast: the loss does not run"):
            trace_step(lambda: nn.Linear(4, 2), spec(batch=2, tokens=16))
    finally:
        log.removeHandler(handler)
    assert bool(seen) == debug
    assert not log.filters
