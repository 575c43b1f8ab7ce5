"""Steps by kernels in CUDA C++ alone are near the plain program's: each line of them runs here, on
a processor (tests/ops/emulated.h), where no GPU is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lezero.core import device
from lezero.ops import cuda_source, linear
from lezero.ops.decoder import cuda_attend
from lezero.ops.linear import rows
from lezero.serve import captured, decoding
from lezero.serve.captured import CapturedProgram
from lezero.serve.decoding import Decoder
from lezero.serve.program import Fed
from tests.ops.emulated import take_place
from tests.serve import decoder_triton
from tests.serve.decoder_triton import MODELS, programs

pytestmark = pytest.mark.skipif(
    device.accelerator() == "cuda", reason="test_decoding.py runs there"
)
ATTENTION = "lezero.ops.decoder.triton_attend"


@pytest.fixture(autouse=True)
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    take_place(monkeypatch)
    monkeypatch.setattr(cuda_source, "runs", lambda place: True)
    monkeypatch.setattr(Decoder, "suits", staticmethod(decoding.fits))
    monkeypatch.setattr(rows, "takes_rows", lambda place: True)
    stub = SimpleNamespace(suits=lambda dtype, bits, group: True)
    monkeypatch.setitem(sys.modules, "lezero.ops.linear.triton_few", stub)
    monkeypatch.setattr(linear, "triton_few", stub, raising=False)
    monkeypatch.setitem(sys.modules, ATTENTION, None)  # it cannot be imported
    for name, made in MODELS.items():
        monkeypatch.setitem(MODELS, name, {**made, "head_dim": 64})


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, decoder_triton.steps) for name in ("bf16", "window", "int4", "symmetric", "int8")]
    + [("bf16", decoder_triton.ahead)],
)
def test_steps_are_near_those_of_the_plain_program(name: str, way: Callable[[str], Any]) -> None:
    found = list(way(name))
    assert found
    assert [said for said, right in found if not right] == []


Seconds = Callable[[Any, Any, int], list[float]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Seconds], list[str]]:
    """Lets both attentions be ours, and the trial's clock be what is given; returns the names of
    those that are called."""
    called: list[str] = []
    real = cuda_attend.attend

    def told(name: str) -> Callable[..., Any]:
        def attend(*given: Any, **named: Any) -> Any:
            called.append(name)
            return real(*given, **named)

        return attend

    def use(seconds: Seconds) -> list[str]:
        monkeypatch.setattr(cuda_attend, "attend", told("ours"))
        monkeypatch.setitem(sys.modules, ATTENTION, SimpleNamespace(attend=told("theirs")))
        monkeypatch.setattr(captured, "seconds_of", seconds)
        return called

    return use


def stepped(program: CapturedProgram, blocks: int, sequences: int = 1) -> Any:
    fed = [Fed([3], blocks * 16 - 1, list(range(blocks)), [0])] * sequences
    return program.run(fed)


@pytest.mark.parametrize("faster", [True, False])
def test_attention_is_the_one_that_is_faster(
    timed: Callable[[Seconds], list[str]], faster: bool
) -> None:
    ends: list[int] = []

    def seconds(steps: Any, fed: Any, nobody: int) -> list[float]:
        ends.append(fed[0].position)
        assert fed[0].blocks[-1] == nobody  # the others are only read
        assert nobody not in fed[0].blocks[:-1]
        assert len(steps) == 2
        return [1.0, 2.0] if faster else [2.0, 1.0]

    called = timed(seconds)
    _, program = programs("bf16")
    for sequences, blocks, tried in [(1, 1, True), (1, 4, True), (2, 4, False), (1, 1, False)]:
        called.clear()
        stepped(program, blocks, sequences)
        wanted = {"ours", "theirs"} if tried else {"ours" if faster else "theirs"}
        assert set(called) == wanted
        called.clear()
        stepped(program, blocks, sequences)  # as the graph that was kept does
        assert set(called) == {"ours" if faster else "theirs"}
    assert ends == [15, 63]  # once for each number of blocks, at the end of them


def test_a_trial_changes_nothing_that_others_have(
    timed: Callable[[Seconds], list[str]],
) -> None:
    real = captured.seconds_of
    timed(real)
    _, program = programs("bf16")
    assert program._keys is not None
    flying = program._best_B.random_(0, 50).clone()
    keys = program._keys[:, : 16 * 30].zero_()
    before = keys.clone()
    stepped(program, 4)
    assert set(program.tried[4]) == {"cuda", "triton"}
    assert all(0 < took < 60 for took in program.tried[4].values())
    assert torch.equal(program._best_B[1:], flying[1:])
    changed = (keys != before).any(-1).any(-1)
    assert changed.nonzero()[:, 1].unique().tolist() == [63]  # the step's own place


def test_a_step_without_slices_tries_nothing(timed: Callable[[Seconds], list[str]]) -> None:
    timed(lambda *_: pytest.fail("a trial of nothing"))
    _, program = programs("bf16")
    decoder = program._decoder
    assert decoder is not None
    assert decoder.attends_to(16)
    assert not decoder.attends_to(17)
    decoder.slices = False
    assert program._settled(SimpleNamespace(), (1, 1)) is not None  # type: ignore[arg-type]
    assert program.tried == {}


@pytest.mark.parametrize("error", [torch.AcceleratorError("busy", 900), RuntimeError("no")])
def test_a_trial_that_fails_leaves_our_attention(
    timed: Callable[[Seconds], list[str]], error: Exception
) -> None:
    def fails(*_: Any) -> list[float]:
        raise error

    called = timed(fails)
    _, program = programs("bf16")
    flying = program._best_B.random_(0, 50).clone()
    stepped(program, 1)
    assert torch.equal(program._best_B[1:], flying[1:])
    called.clear()
    stepped(program, 1)
    assert set(called) == {"ours"}
    assert (1 in program.tried) == (type(error) is RuntimeError)


def test_attention_that_does_not_run_leaves_products_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = cuda_attend.attend

    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("NVRTC does not compile attend.cu")

    monkeypatch.setattr(cuda_attend, "attend", broken)
    monkeypatch.setitem(sys.modules, ATTENTION, SimpleNamespace(attend=real))
    _, program = programs("bf16")
    stepped(program, 1)
    assert program._decoder is not None
    assert program._decoder.slices
    assert not program._decoder.attends
    assert "our attention does not run here" in caplog.text


def test_models_whose_heads_have_no_kernel_take_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "bf16", {**MODELS["bf16"], "head_dim": 32})
    made = Decoder(decoder_triton.model(**MODELS["bf16"]))
    assert made.slices
    assert not made.attends
    with pytest.raises(ImportError, match="triton_attend"):
        made.logits(*(torch.zeros(1, 1, dtype=torch.int64)[:, i] for i in (0, 0)), *[None] * 3)  # type: ignore[arg-type]


def test_seconds_are_those_of_each_step() -> None:
    def step(took: float) -> Any:
        return SimpleNamespace(
            fill=lambda fed, nobody: None, wait=lambda: None, replay=lambda: time.sleep(took)
        )

    short, long = captured.seconds_of([step(1e-4), step(3e-3)], [], 0)
    assert 1e-4 <= short < long
    assert long >= 3e-3
