"""What the library of matrix products keeps, and where it lies in a step's heap."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from lezero.plan import scratch
from lezero.plan.calls import Call, TensorFact
from lezero.plan.forecast import memory_of
from lezero.plan.measure import Timed, time_call
from lezero.plan.scratch import growth, kept_bytes, scratch_of
from lezero.plan.spec import StepSpec
from lezero.plan.trace import trace_step

MIB = 1 << 20


def product(m: int, k: int, n: int) -> Call:
    """(m, k) times a weight of (n, k)."""
    x, w = ((m, k), (k, 1)), ((k, n), (1, k))
    facts = [TensorFact(shape, stride, torch.float32) for shape, stride in (x, w)]
    return Call(torch.ops.aten.mm.default, tuple(facts), {}, "aten.mm.default")


def timed(call: Call) -> Timed:
    found = time_call(call)
    assert found is not None
    return found


FRESH = """
import ctypes, json, sys
import torch
from lezero.plan import scratch
from lezero.profiler.memory import rss
m, k, n, threads, refused = map(int, sys.argv[1:])
torch.set_num_threads(threads)
if refused:  # glibc sends the thread to another heap, the end of which malloc_trim leaves alone
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    assert libc.malloc(1 << 50) is None
    libc.free(libc.malloc(31 << 20))  # and blocks up to this size come from a heap from now on
x, w, out = torch.rand(m, k), torch.rand(n, k).t(), torch.zeros(m, n)
torch.mm(x[:8], w, out=torch.zeros(8, n))
scratch._mkl().mkl_serv_free_buffers()
before = rss()
torch.mm(x, w, out=out)
grown, taken = rss() - before, scratch._mkl().mkl_serv_mem_stat(ctypes.byref(ctypes.c_int()))
found = [scratch.scratch_of(lambda: torch.mm(x, w, out=out)) for _ in "ab"]
print(json.dumps([grown, taken, *found]))
"""


@pytest.mark.skipif(scratch._mkl() is None, reason="torch was built without MKL")
@pytest.mark.parametrize(
    ("shape", "instructions", "refused"),
    [
        ((512, 384, 16384, 2), "", 0),
        ((512, 384, 16384, 2), "", 1),
        ((512, 384, 16384, 2), "AVX2", 0),
        ((512, 384, 16384, 2), "AVX2", 1),
        ((1024, 192, 32768, 1), "", 1),
        ((512, 192, 192, 2), "", 0),
    ],
)
def test_scratch_is_what_a_process_grows_by(
    shape: tuple[int, ...], instructions: str, refused: int
) -> None:
    """How much it is differs with the processor: 24 MiB for the first shape with AVX-512, 12 with
    AVX2, 10 on a Zen 3, and what MKL takes for almost any product counts as none. (The numbers of a
    product: rows, features, results, threads.)"""
    asked = {"MKL_ENABLE_INSTRUCTIONS": instructions} if instructions else {}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, *map(str, (*shape, refused))],
        capture_output=True, text=True, timeout=120, env=os.environ | asked,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown, taken, first, again = json.loads(done.stdout)
    usual = taken < scratch._USUAL * shape[-1]
    assert first == (0 if usual else pytest.approx(grown, abs=2 * MIB))
    assert again == pytest.approx(first, abs=MIB)


@pytest.mark.skipif(scratch._mkl() is None, reason="torch was built without MKL")
def test_products_of_few_features_take_no_scratch_of_their_own() -> None:
    assert timed(product(64, 64, 64)).scratch == 0
    assert timed(product(512, 192, 192)).scratch == 0


def test_what_others_allocate_meanwhile_counts_only_where_no_two_readings_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seen(*readings: int | None) -> int:
        left = iter(readings)
        monkeypatch.setattr(scratch, "_reading", lambda run: next(left))
        return scratch_of(lambda: None)

    assert seen(None) == 0
    assert seen(24, 24) == 24
    assert seen(1, 24, 48, 24) == 24
    assert seen(1, 50, 24, 10, 3) == 10
    assert seen(0, 0) == 0


def test_what_a_call_takes_is_measured_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lezero.plan.measure.scratch_of", lambda run: (run(), 7)[1])
    assert timed(product(64, 64, 64)).scratch == 7


def test_without_mkl_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_mkl", lambda: None)
    assert timed(product(512, 384, 16384)).scratch == 0


def test_a_block_stays_for_each_call_that_needs_more_than_those_before() -> None:
    needs = {"a": 5, "c": 4, "d": 9, "e": 9, "not made": 100}
    first = {"a": 1, "b": 2, "c": 3, "d": 7, "e": 8}
    assert list(growth(needs, first)) == [(5, 1), (9, 7)]
    assert kept_bytes(needs, first) == 14


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32768, 64), nn.Linear(64, 32768)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.embedding(tokens))
        return scores


def test_scratch_lies_between_the_scores_and_their_gradient() -> None:
    """The hole that each leaves is shared with nothing, and the optimizer's state comes into one:
    steps after the first need another block of scores."""
    spec = StepSpec(batch=2, tokens=256)
    trace = trace_step(Words, spec)
    scores = 2 * 256 * 32768 * 4
    key = next(key for key in trace.first if "mm" in key and "32768" in key)
    needs = {key: 16 * MIB}
    events = trace.heap_steps(1, needs)
    at = events.index((-2, 16 * MIB))
    assert events[at - 1][1] == scores
    assert len(events) == len(trace.heap_steps(1, {})) + 1
    without, _ = memory_of(trace, spec, {})
    total, parts = memory_of(trace, spec, needs)
    assert total == sum(parts.values())
    assert parts["libraries"] == memory_of(trace, spec, {})[1]["libraries"] + 16 * MIB
    # In which hole small objects settle is chance: it differs even with the length of a path.
    assert total >= without + 16 * MIB - (1 << 16)
