"""Steps by kernels in CUDA C++ alone are near the plain program's: each line of them runs here, on
a processor (tests/ops/emulated.h), where no GPU is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lezero.core import device
from lezero.ops import cuda_source, linear
from lezero.ops.decoder import cuda_attend
from lezero.ops.linear import rows
from lezero.serve import captured, decoding
from lezero.serve.captured import CapturedProgram
from lezero.serve.decoding import Decoder
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


def decoder_of(program: CapturedProgram) -> Decoder:
    assert program._decoder is not None
    return program._decoder


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, decoder_triton.steps) for name in ("bf16", "window", "int4", "symmetric", "int8")]
    + [("bf16", decoder_triton.ahead)],
)
def test_steps_are_near_those_of_the_plain_program(name: str, way: Callable[[str], Any]) -> None:
    found = list(way(name))
    assert found
    assert [said for said, right in found if not right] == []


@pytest.mark.parametrize("faster", [True, False])
def test_attention_is_the_one_that_is_faster(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    called: list[str] = []

    def told(name: str) -> Callable[..., Any]:
        def attend(*given: Any, **named: Any) -> Any:
            called.append(name)
            return real(*given, **named)

        return attend

    real = cuda_attend.attend
    monkeypatch.setattr(cuda_attend, "attend", told("ours"))
    monkeypatch.setitem(sys.modules, ATTENTION, SimpleNamespace(attend=told("theirs")))
    timed: list[int] = []

    def seconds(steps: Any, fed: Any, nobody: int) -> list[float]:
        timed.append(fed[0].position)
        assert len(steps) == 2
        return [1.0, 2.0] if faster else [2.0, 1.0]

    monkeypatch.setattr(captured, "seconds_of", seconds)
    _, program = programs("bf16")
    for blocks in (1, 4, 8):
        program.run([decoder_triton.Fed([3], blocks * 16 - 1, list(range(blocks)), [0])])
        if blocks == 1:
            assert set(called) == {"ours", "theirs"}
            called.clear()
    assert timed == [15]  # once, at the end of what the step has room for
    assert set(called) == {"ours" if faster else "theirs"}
    assert decoder_of(program).attends == faster


def test_a_trial_leaves_the_step_that_flies_its_tokens() -> None:
    _, program = programs("bf16")
    fed = [decoder_triton.Fed([3], 5, decoder_triton.BLOCKS[0], [0])]
    first = program.launch(fed)
    assert first is not None
    assert decoder_of(program).undecided is False
    again = program.launch(fed)
    assert again is not None
    assert first.tokens() == again.tokens()
