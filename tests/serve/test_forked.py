"""A model that answered before a fork: the fork has none of its threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

from lezero.core.errors import OrderError
from lezero.serve import LLM, SamplingParams
from tests.serve.models import small

GIVEN = [[1, 2, 3]]
FOUR = SamplingParams(max_tokens=4, temperature=0.0)


def status_of_fork(work: Callable[[], bool]) -> int:
    """0 where `work` holds in a fork, 14 where it never ends."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        held = False
        try:
            held = work()
        finally:
            os._exit(0 if held else 1)
    return os.waitpid(child, 0)[1]


def refused(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except OrderError as error:
        return "is a fork, without its threads" in str(error)
    return False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_is_told_at_once_and_may_use_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        llm = LLM(small(), weights="bf16")
        (expected,) = llm.generate(GIVEN, FOUR)

        begun = llm.stream(GIVEN[0], FOUR)
        next(begun)

        def in_fork() -> bool:
            asked = [
                lambda: next(begun),
                lambda: llm.generate(GIVEN, FOUR),
                lambda: next(iter(llm.stream(GIVEN[0], FOUR))),
                lambda: llm.embed(GIVEN),
            ]
            told = all(map(refused, asked))
            torch.set_num_threads(1)
            (alone,) = llm.generate(GIVEN, FOUR)
            return told and alone.tokens == expected.tokens

        assert status_of_fork(in_fork) == 0
        assert sum(len(piece.tokens) for piece in begun) == 3
        assert llm.generate(GIVEN, FOUR)[0].tokens == expected.tokens
    finally:
        torch.set_num_threads(before)
