"""Steps of fixed shapes give what the plain program gives; capturing itself needs a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lezero.core import device
from lezero.ops.decoder import cuda_step
from lezero.serve.captured import _PIECES, CapturedProgram, best_token
from lezero.serve.engine import Engine
from lezero.serve.flight import Flight
from lezero.serve.plain import PlainProgram
from lezero.serve.program import Fed, Program
from lezero.serve.request import Request
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts, small

SHAPES: list[dict[str, Any]] = [{}, {"qk_norm": True}, {"sliding_window": 20}, {"kv_heads": 4}]


def again(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """As a graph does: the output stays at one place."""
    output = run()

    def replay() -> None:
        output.copy_(run())

    return replay, output


def answers(program: Program, blocks: int, temperature: float = 0.7) -> list[list[int]]:
    engine = Engine(program, blocks=blocks, max_requests=6, longest=200)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=5, ignore_eos=True)
    asked = [Request(str(i), p, params) for i, p in enumerate(prompts(9, longest=60))]
    for request in asked:
        engine.add(request)
    while engine.busy:
        engine.step()
    assert (engine.totals.preempted > 0) == (blocks < 30)
    return [request.answer for request in asked]


@pytest.mark.parametrize("blocks", [16, 200])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_answers_are_those_of_the_plain_program(shape: dict[str, Any], blocks: int) -> None:
    model = small(**shape).double()
    plain, captured = PlainProgram(model), CapturedProgram(model, again)
    assert answers(captured, blocks) == answers(plain, blocks)
    assert {sizes[0] for sizes in captured._steps} <= {1, 2, 4, 8}


class WithoutSlices:
    """In the place of a `Decoder`."""

    def attends_to(self, sequences: int) -> bool:
        return False


class Flown(CapturedProgram):
    """made_in_flight: sizes whose graphs were made while a step flew."""

    made_in_flight = 0

    def launch(
        self, fed: Sequence[Fed], after: Flight | None = None, rows: Sequence[int] = ()
    ) -> Flight | None:
        before = len(self._steps)
        flight = super().launch(fed, after, rows)
        self.made_in_flight += after is not None and len(self._steps) > before
        return flight


@pytest.mark.parametrize("blocks", [16, 200])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_likeliest_tokens_run_ahead_over_sizes_without_a_graph(
    shape: dict[str, Any], blocks: int
) -> None:
    model = small(**shape).double()
    flown = Flown(model, again)
    assert answers(flown, blocks, 0.0) == answers(PlainProgram(model), blocks, 0.0)
    assert flown.made_in_flight > 0


def test_logits_are_those_of_the_plain_program() -> None:
    model = small()
    found = []
    for program in (PlainProgram(model), CapturedProgram(model, again)):
        program.reserve(12)
        for cache in (program._keys, program._values):
            assert cache is not None
            cache.fill_(torch.nan)  # as a poisoned request leaves it
        program.run([Fed(range(20), 0, [3, 1], [19]), Fed(range(5), 0, [7], [4])])
        fed = [Fed([8], 20, [3, 1], [0]), Fed([9], 5, [7], [0]), Fed([4], 0, [5], [0])]
        found.append(program.run(fed))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_single_tokens_stay_in_their_graph_beside_prompts_and_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small().double()
    prompt, part = Fed(range(7), 0, [4], [6]), Fed(range(9), 0, [6])
    drafts = Fed([5, 6, 7], 5, [7], [0, 1, 2])
    ones = [Fed([8], 20, [3, 1], [0]), *(Fed([n], 0, [n], [0]) for n in (5, 8, 9))]
    fed = [ones[0], prompt, part, *ones[1:], drafts]
    found, plainly = [], list[list[Fed]]()
    for program in (PlainProgram(model), CapturedProgram(model, again)):
        program.reserve(12)
        program.run([Fed(range(20), 0, [3, 1], [19]), Fed(range(5), 0, [7], [4])])
        ran = program._states
        monkeypatch.setattr(program, "_states", lambda x, ran=ran: (plainly.append(x), ran(x))[1])
        found.append(program.run(fed))
        found.append(program.run(few := [part, prompt, *ones[:3]]))
    assert plainly == [fed, few, [prompt, part, drafts], few]
    assert found[0].shape[0] == 8
    torch.testing.assert_close(found[2:], found[:2])


def test_more_sequences_than_a_graph_has_are_taken_in_turns() -> None:
    model, found = small().double(), []
    fed = [Fed([n % 90], 0, [n], [0]) for n in range(130)]
    mixed = [fed[0], Fed(range(7), 0, [140], [6]), *fed[1:66]]
    captured = CapturedProgram(model, again)
    for program in (PlainProgram(model), captured):
        program.reserve(150)
        found += [program.run(fed), program.run(mixed)]
    torch.testing.assert_close(found[2:], found[:2])
    assert set(captured._steps) == {(64, 1), (2, 1)}
    assert captured.launch(fed) is None


@pytest.mark.parametrize("width", [1, 97, 4 * _PIECES])
def test_the_best_token_is_the_first_of_the_largest(width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    logits = torch.randint(0, 5, (40, width), generator=draw).float()  # many are equal
    assert torch.equal(best_token(logits), (logits == logits.amax(1, keepdim=True)).int().argmax(1))
    for row, spoilt in enumerate((torch.nan, torch.inf)):
        logits[row, width // 2] = spoilt
    logits[2] = -torch.inf
    assert (best_token(logits) == -1).nonzero().flatten().tolist() == [0, 1, 2]


def test_steps_that_cannot_be_captured_run_as_plain_ones() -> None:
    tried: list[int] = []

    def full(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        tried.append(len(run()))
        raise torch.OutOfMemoryError("out of memory")

    model = small().double()
    captured = CapturedProgram(model, full)
    assert answers(captured, 16) == answers(PlainProgram(model), 16)
    assert 1 in tried
    assert len(tried) == len(captured._steps)  # once for each size


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (subprocess.CalledProcessError(1, "gcc"), False),  # of Triton, without Python.h
        (NotImplementedError("shared memory"), False),
        (RuntimeError("Failed to find C compiler"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("CUDA error: operation not permitted", 900), True),
    ],
    ids=lambda given: type(given).__name__,
)
def test_kernels_that_cannot_be_built_give_way_to_plain_operations(
    error: Exception, stays: bool
) -> None:
    class Broken(WithoutSlices):
        def logits(self, *given: Any) -> Tensor:
            raise error

    model = small().double()
    captured = CapturedProgram(model, again)
    captured._decoder = Broken()  # type: ignore[assignment]
    assert answers(captured, 200) == answers(PlainProgram(model), 200)
    assert (captured._decoder is not None) == stays
    assert all((step is None) == stays for step in captured._steps.values())


def test_kernels_of_many_sequences_that_cannot_be_built_leave_those_of_few() -> None:
    class Broken(WithoutSlices):
        def logits(self, token_B: Tensor, *given: Any) -> Tensor:
            if len(token_B) > 16:
                raise NotImplementedError("shared memory")
            return F.one_hot(token_B + 1, 256).double()

    captured = CapturedProgram(small().double(), again)
    kernels = captured._decoder = Broken()  # type: ignore[assignment]
    captured.reserve(40)
    many = captured.launch([Fed([5], 0, [i], [0]) for i in range(17)])
    assert many is not None
    few = captured.launch([Fed([5], 0, [0], [0])])
    assert few is not None
    assert few.tokens() == [6]
    assert captured._decoder is kernels
    assert all(captured._steps.values())


def test_cuda_kernels_that_cannot_be_built_leave_triton_many_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Kernels(WithoutSlices):
        def logits(self, token_B: Tensor, *given: Any) -> Tensor:
            return F.one_hot(token_B + 1, 256).double()

    def broken(*_: Any) -> Tensor:
        raise RuntimeError("NVRTC does not compile step.cu")

    monkeypatch.setattr(cuda_step, "chosen", broken)
    captured = CapturedProgram(small().double(), again)
    kernels = captured._decoder = Kernels()  # type: ignore[assignment]
    captured._launches = True
    captured.reserve(40)
    many = captured.launch([Fed([5], 0, [i], [0]) for i in range(17)])
    assert many is not None
    assert many.tokens() == [6] * 17
    assert captured._decoder is kernels


def test_a_graph_keeps_tables_that_the_model_replaces() -> None:
    captured = CapturedProgram(model := small().double(), again)
    captured.reserve(8)
    table = model.rope.cos_TP
    assert captured.launch([Fed([5], 0, [1], [0])]) is not None
    model.double()  # makes tables anew
    assert model.rope.cos_TP is not table
    (step,) = captured._steps.values()
    assert step is not None
    assert any(kept is table for kept in step.kept)


def test_launches_that_cannot_be_compiled_give_way_to_plain_operations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("NVRTC does not compile step.cu")

    monkeypatch.setattr(cuda_step, "chosen", broken)
    model = small().double()
    captured = CapturedProgram(model, again)
    captured._launches = True
    assert answers(captured, 200) == answers(PlainProgram(model), 200)
    assert not captured._launches
    assert all(captured._steps.values())
    assert "CUDA kernels do not run here" in caplog.text


def test_kernels_stay_where_only_a_capture_fails() -> None:
    class Kernels(WithoutSlices):
        def logits(self, token_B: Tensor, *given: Any) -> Tensor:
            return F.one_hot(token_B + 1, 256).double()

    captures = 0

    def interrupted(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        nonlocal captures
        captures += 1
        if captures > 1:
            return again(run)
        run()
        raise RuntimeError("operation failed due to a previous error during capture")

    model = small().double()
    captured = CapturedProgram(model, interrupted)
    kernels = captured._decoder = Kernels()  # type: ignore[assignment]
    captured.reserve(8)
    assert captured.launch([Fed([5], 0, [1], [0])]) is None
    flight = captured.launch([Fed([5], 0, [1], [0]), Fed([7], 0, [2], [0])])
    assert flight is not None
    assert flight.tokens() == [6, 8]
    assert captured._decoder is kernels
    assert captures == 2  # one for each size


def test_all_work_is_done_with_the_models_device_as_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside: list[torch.device] = []
    seen: list[list[torch.device]] = []

    @contextmanager
    def using(place: torch.device) -> Iterator[None]:
        inside.append(place)
        yield
        inside.pop()

    def noted(function: Callable[..., Any], *given: Any) -> Any:
        seen.append(inside[:1])
        return function(*given)

    monkeypatch.setattr(device, "using", using)
    monkeypatch.setattr(F, "linear", partial(noted, F.linear))
    program = CapturedProgram(small(), partial(noted, again))
    seen.clear()
    program.reserve(4)
    program.run([Fed(range(5), 0, [1], [4])])
    program.states([Fed(range(5), 0, [1], [4])])
    program.run([Fed([3], 5, [1], [0])])
    assert program.launch([Fed([3], 5, [1], [0])]) is not None
    assert seen
    assert all(places == [program.place] for places in seen)


@pytest.mark.skipif(device.accelerator() != "cuda", reason="no CUDA device")
def test_graphs_give_what_the_plain_program_gives() -> None:
    model = small().to(device.device())
    assert CapturedProgram.suits(model)
    for temperature in (0.0, 0.7):
        wanted = answers(PlainProgram(model), 16, temperature)
        assert answers(CapturedProgram(model), 16, temperature) == wanted
