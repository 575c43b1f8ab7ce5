"""A run before the first client: what it sees, how long it takes, and that it leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lezero.core.errors import ConfigError, LeZeroError
from lezero.serve import rehearsal
from lezero.serve.llm import LLM
from lezero.serve.rehearsal import rehearse
from lezero.serve.request import Request
from lezero.serve.sampling import SamplingParams
from tests.serve.models import VOCAB, runs, small


class Clock:
    """Time that passes where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def timed(llm: LLM, monkeypatch: pytest.MonkeyPatch, step_s: float, token_s: float) -> list[int]:
    """Lets a step take that long, and each of its tokens; the tokens of each step."""
    clock, run, fed_by = Clock(), llm.program.run, list[int]()
    monkeypatch.setattr(rehearsal, "time", clock)

    def slowly(fed: Any) -> torch.Tensor:
        count = sum(len(one.tokens) for one in fed)
        fed_by.append(count)
        clock.now += step_s + token_s * count
        return run(fed)

    runs(llm.program, slowly)
    return fed_by


def test_speeds_are_those_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(small(), weights="fp32")
    fed = timed(llm, monkeypatch, step_s=0.001, token_s=0.0001)
    seen = rehearse(llm.engine, llm.room)
    assert fed == [1] * (8 + 2 * 49) + [16, 64, 256]
    assert seen.alone.tokens == seen.drawn.tokens == 47, "of 49, the prompt's and the next one's"
    assert seen.alone.speed == pytest.approx(1 / 0.0011)
    assert seen.drawn.speed == pytest.approx(1 / 0.0011)
    assert seen.filling.speed == pytest.approx(256 / (0.001 + 0.0256))
    assert seen.guessing.speed is None


def test_a_slow_model_is_not_tried_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(small(), weights="fp32")
    fed = timed(llm, monkeypatch, step_s=2.0, token_s=0.0)
    seen = rehearse(llm.engine, llm.room)
    assert fed == [1] * 9 + [16], "a prompt and two tokens, to get warm and of each sort"
    assert seen.alone.speed == seen.drawn.speed == pytest.approx(0.5)
    assert seen.filling.speed is None, "a short prompt does not show what long ones reach"


@pytest.mark.parametrize(("step_s", "token_s"), [(0.009, 5e-4), (0.1, 0.004), (0.3, 0.01)])
def test_a_prompt_that_is_told_reaches_what_long_ones_do(
    monkeypatch: pytest.MonkeyPatch, step_s: float, token_s: float
) -> None:
    llm = LLM(small(), weights="fp32")
    timed(llm, monkeypatch, step_s, token_s)
    found = rehearse(llm.engine, llm.room).filling.speed
    assert found is not None
    assert found >= 0.64 * 256 / (step_s + 256 * token_s)


def test_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(small(), weights="fp32")
    asked, add = list[Request](), llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda request: asked.append(request) or add(request))
    rehearse(llm.engine, llm.room)
    assert [one.params.temperature for one in asked] == [1, 0, 1, 0, 0, 0]
    assert [one.greedy for one in asked] == [one.params.temperature == 0 for one in asked]
    assert not any(one.params.penalizes for one in asked)


@pytest.mark.parametrize("room", [2, 3, 4, 18, 19, 40, 67, 260])
def test_room_is_kept(room: int) -> None:
    llm = LLM(small(), weights="fp32", context=room)
    seen = rehearse(llm.engine, llm.room)
    assert (seen.alone.speed is None) == (room < 4), "a third token is the first that counts"
    assert (seen.filling.speed is None) == (room < 65)


@pytest.mark.parametrize("room", [19, 68, 260])
def test_steps_in_one_call_count_in_any_room(room: int) -> None:
    llm = LLM(small(), weights="int8", context=room)
    seen = rehearse(llm.engine, llm.room)
    assert seen.alone.tokens >= 9
    assert seen.drawn.tokens >= 9


@pytest.mark.parametrize("speculate", ["off", "lookup"])
def test_nothing_is_left(speculate: Any) -> None:
    llm = LLM(small(), weights="fp32", speculate=speculate)
    rehearse(llm.engine, llm.room)
    assert not llm.engine.busy
    assert llm.engine.pool.used_count == 0
    assert llm.engine.totals.drafted == 0
    llm.engine.pool.check([])
    params = SamplingParams(max_tokens=20)  # its seed is its place among all that came
    fresh = LLM(small(), weights="fp32", speculate=speculate)
    found, expected = (x.generate([[5, 6, 7]], params)[0].tokens for x in (llm, fresh))
    assert found == expected


def test_guesses_are_not_judged_by_it() -> None:
    llm = LLM(small(), weights="fp32", speculate="lookup")
    rehearse(llm.engine, llm.room)
    guesser: Any = llm.engine._speculator
    assert set(guesser._duels) <= {0}


@pytest.mark.parametrize("place", [2, 10, 49, 60])
def test_a_model_that_breaks_off_later_is_served(
    place: int, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(small(), weights="fp32")
    run = llm.program.run

    def breaks(fed: Any) -> torch.Tensor:
        late = any(one.position + len(one.tokens) >= place for one in fed)
        return run(fed) * (float("nan") if late else 1.0)

    runs(llm.program, breaks)
    seen = rehearse(llm.engine, llm.room)
    assert (seen.alone.speed is not None) == (place > 8), "those after the first eight"
    assert "are let in broke off: the model's logits" in caplog.text
    llm.engine.scheduler.check()


def test_a_model_that_gives_no_token_is_told() -> None:
    llm = LLM(small(), weights="fp32")
    runs(llm.program, lambda fed: torch.full((1, VOCAB), float("nan")))
    with pytest.raises(LeZeroError, match=r"does not give even one token: .* hold NaN"):
        rehearse(llm.engine, llm.room)
    assert llm.engine.pool.used_count == 0


def test_what_breaks_later_is_told_and_served(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_ANSWER_S", 60)  # no answer is cut short
    llm = LLM(small(), weights="fp32")
    run = llm.program.run

    def breaks(fed: Any) -> torch.Tensor:
        return run(fed) * (float("nan") if len(fed[0].tokens) == 64 else 1.0)

    runs(llm.program, breaks)
    seen = rehearse(llm.engine, llm.room)
    assert seen.alone.tokens == seen.drawn.tokens == 47
    assert seen.filling.speed is None
    assert "are let in broke off: the model's logits" in caplog.text
    assert llm.engine.pool.used_count == 0


def test_no_room_for_any_request() -> None:
    llm = LLM(small(), weights="fp32", context=1)
    with pytest.raises(ConfigError):
        rehearse(llm.engine, llm.room)
