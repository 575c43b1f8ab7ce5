"""Ctrl-C at any moment of what has the engine for itself: whoever comes next gets it."""

from __future__ import annotations

import dis
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.models import small

GREEDY = SamplingParams(temperature=0, max_tokens=4)
_TRACED = ("llm.py", "answer.py", "interrupts.py", "contextlib.py")
_LOOKS = ("RESUME", "CALL", "JUMP_BACKWARD")
"""In names of the instructions behind which Python looks for signals."""


def pressed_at(number: int, work: Callable[[], object]) -> bool:
    """Does it with Ctrl-C where Python looks for it the nth time; whether it does so that often."""
    left = number

    def trace(begun: FrameType, _: str, __: Any) -> Any:
        if not begun.f_code.co_filename.endswith(_TRACED):
            return None
        begun.f_trace_opcodes = True
        code, looks = begun.f_code.co_code, True

        def each(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left, looks
            if event == "opcode":
                left -= looks
                name = dis.opname[code[frame.f_lasti]]
                looks = any(part in name for part in _LOOKS)
                if left == 0:
                    left = -1
                    os.kill(os.getpid(), signal.SIGINT)
            return each

        return each

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left < 0


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("what", ["end", "completion"])
def test_ctrl_c_at_any_moment_leaves_the_engine_to_others(what: str) -> None:
    llm = LLM(small(), weights="bf16")
    wanted = llm.generate([1, 2, 3], GREEDY)[0].tokens
    answer = llm.begin(llm.request([1, 2, 3], GREEDY))
    while answer.request.reason is None:
        llm.advance()
    number = 1
    while pressed_at(number, lambda: getattr(llm, what)(answer)):
        number += 1
        assert not llm._lock.locked(), number
    assert number > 30
    llm.end(answer)
    assert llm.generate([1, 2, 3], GREEDY)[0].tokens == wanted
    assert llm.engine.pool.used_count == 0


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_as_a_server_begins_or_ends_leaves_the_model_to_python() -> None:
    llm = LLM(small(), weights="bf16")

    def serve() -> None:
        with llm.served():
            pass

    number = 1
    while pressed_at(number, serve):
        number += 1
        assert not llm._served, number
        assert not llm._lock.locked(), number
    assert number > 30
    assert llm.generate([1, 2, 3], GREEDY)[0].error is None
