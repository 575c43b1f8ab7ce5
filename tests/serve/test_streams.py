"""Streams that overlap with each other and with calls: no token is lost, nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lezero.core.errors import ConfigError
from lezero.data.tokenizer import bytes_tokenizer
from lezero.serve.coder import Coder
from lezero.serve.llm import LLM
from lezero.serve.offline import answer_lines
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts, small

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def engine(**options: Any) -> LLM:
    tokenizer = bytes_tokenizer()
    coder = Coder(tokenizer, frozenset([tokenizer.eos]))
    return LLM(small(vocab=257), weights="bf16", coder=coder, **options)


def tokens_of(stream: Any) -> list[int]:
    return [token for piece in stream for token in piece.tokens]


def test_streams_in_turns_lose_nothing():
    llm = engine()
    alone = [llm.generate(text, GREEDY)[0] for text in ("one", "and two")]
    first, second = llm.stream("one", GREEDY), llm.stream("and two", GREEDY)
    pieces: list[list[Any]] = [[next(first)], [next(second)]]
    pieces[0] += first
    pieces[1] += second
    for found, expected in zip(pieces, alone, strict=True):
        assert tokens_of(found) == expected.tokens
        assert "".join(piece.text for piece in found) == expected.text
        assert found[-1].reason == expected.reason
    assert not llm.engine.busy
    assert not llm._answers


def test_a_stream_goes_on_beside_calls():
    llm = engine()
    expected = llm.generate([4, 5, 6], GREEDY)[0].tokens
    stream = llm.stream([4, 5, 6], GREEDY)
    begun = next(stream).tokens
    assert len(llm.generate([[7, 8], [9]], GREEDY)) == 2
    llm.embed([[1, 2, 3]])
    assert begun + tokens_of(stream) == expected


def test_a_stream_that_is_not_begun_leaves_nothing():
    llm = engine()
    llm.stream([1, 2], GREEDY).close()
    assert not llm.engine.busy
    stream = llm.stream([1, 2], GREEDY)
    del stream
    gc.collect()
    assert not llm.engine.busy
    assert not llm._answers


def test_a_stream_that_is_collected_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch):
    llm = engine()
    expected = llm.generate([4, 5, 6], GREEDY)[0].tokens
    held = [llm.stream([1, 2], GREEDY)]
    schedule = llm.engine.scheduler.schedule

    def collects() -> Any:
        held.clear()  # as the collector may, in this very thread
        assert len(llm._answers) == 2
        return schedule()

    stream = llm.stream([4, 5, 6], GREEDY)
    monkeypatch.setattr(llm.engine.scheduler, "schedule", collects)
    begun = next(stream).tokens
    assert len(llm._answers) == 1
    monkeypatch.undo()
    assert begun + tokens_of(stream) == expected
    assert llm.engine.pool.used_count == 0


def test_threads_may_ask_at_once():
    llm = engine(max_requests=4)
    given = prompts(12, longest=30)
    expected = [llm.generate(prompt, GREEDY)[0].tokens for prompt in given]
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = (
            tokens_of(llm.stream(given[number], GREEDY))
            if number % 2
            else llm.generate(given[number], GREEDY)[0].tokens
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(given))] == expected
    assert llm.engine.pool.used_count == 0


@pytest.mark.parametrize("count", [1, 20])
def test_a_stream_does_not_look_between_anothers_step_and_its_text(
    monkeypatch: pytest.MonkeyPatch, count: int
):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    llm = engine()
    expected = llm.generate("one", params)[0]
    step, stepped, goes_on = llm.engine.step, threading.Event(), threading.Event()

    def paused() -> Any:
        progress = step()
        stepped.set()
        goes_on.wait(1)  # until the stream has looked, or cannot
        return progress

    stream = llm.stream("one", params)
    monkeypatch.setattr(llm.engine, "step", paused)
    other = threading.Thread(target=llm.advance)
    other.start()
    assert stepped.wait(30)
    pieces = [next(stream)]
    goes_on.set()
    other.join()
    monkeypatch.undo()
    pieces += stream
    assert pieces[0].text == expected.text[: len(pieces[0].text)] != ""
    assert "".join(piece.text for piece in pieces) == expected.text
    assert tokens_of(pieces) == expected.tokens
    assert pieces[-1].reason == expected.reason


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("in_lines", [False, True])
def test_an_answer_is_not_taken_between_anothers_last_step_and_its_text(
    monkeypatch: pytest.MonkeyPatch, count: int, in_lines: bool
):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    llm = engine()
    expected = llm.generate("one", params)[0]
    advance, step, stepped = llm.advance, llm.engine.step, threading.Event()
    others: list[threading.Thread] = []

    def paused() -> Any:
        progress = step()
        stepped.set()
        if progress.ended:
            time.sleep(0.2)  # for the answer to be taken, or not
        return progress

    def by_another() -> None:
        stepped.clear()
        others.append(threading.Thread(target=advance))
        others[-1].start()
        assert stepped.wait(30)

    monkeypatch.setattr(llm.engine, "step", paused)
    monkeypatch.setattr(llm, "advance", by_another)
    if in_lines:
        (told,) = answer_lines(llm, ['{"prompt": "one"}'], params)
        found = told["text"], told["tokens"], told["reason"]
    else:
        one = llm.generate("one", params)[0]
        found = one.text, len(one.tokens), one.reason
    for other in others:
        other.join()
    assert found == (expected.text, len(expected.tokens), "length")


def test_a_seed_gives_the_same_answer_wherever_a_prompt_stands():
    llm = engine()
    params = SamplingParams(max_tokens=12, seed=5)
    alone = llm.generate("a text", params)[0].tokens
    assert [x.tokens for x in llm.generate(["other", "a text", "a text"], params)][1:] == [
        alone
    ] * 2
    assert tokens_of(llm.stream("a text", params)) == alone


def test_a_lower_priority_number_runs_first():
    llm = engine(max_requests=1)
    later = llm.stream([1, 2, 3], GREEDY, priority=1)
    sooner = llm.stream([4, 5, 6], GREEDY, priority=0)
    next(sooner)
    assert not later._answer.request.answer
    assert len(tokens_of(later)) == 20  # and it waits for the other's end
    assert len(tokens_of(sooner)) == 19
    with pytest.raises(ConfigError, match="priority: got 'high'"):
        llm.generate([1], GREEDY, priority="high")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "prompts: got NoneType"),
        (5, "prompts: got int"),
        (b"abc", "prompts: got bytes"),
        ([None], "prompt: got NoneType"),
        ([b"abc"], "prompt: got bytes"),
        ("a\ud800", "half of a surrogate pair"),
    ],
)
def test_what_is_no_prompt_is_refused(given: Any, says: str):
    with pytest.raises(ConfigError, match=says):
        engine().generate(given, GREEDY)


def test_stop_strings_need_a_tokenizer():
    llm = LLM(small(), weights="bf16")
    with pytest.raises(ConfigError, match="stop: this model has no tokenizer"):
        llm.generate([1, 2], SamplingParams(stop="x"))


def test_parameters_may_be_mappings_and_nothing_else():
    llm = engine()
    short = {"max_tokens": 2, "temperature": 0}
    assert [len(x.tokens) for x in llm.generate([[1], [2]], [short, GREEDY])] == [2, 20]
    assert len(tokens_of(llm.stream([1], short))) == 2  # type: ignore[arg-type]
    for wrong in (5, "abc"):
        with pytest.raises(ConfigError, match="params: got"):
            llm.generate([1], wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"context": "8"}, {"max_requests": 2.5}, {"cache_bytes": 0}, {"context": True}]
)
def test_options_are_whole_numbers_of_1_or_more(options: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(options))):
        LLM(small(), weights="bf16", **options)


class Breaking:
    """A tokenizer that has no text for one of its tokens."""

    bad: int | None = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 100 for letter in text]

    def decode(self, tokens: Any) -> str:
        if self.bad in tokens:
            raise KeyError(f"no token {self.bad}")
        return "".join(chr(65 + token % 26) for token in tokens)


def breaking(ask: SamplingParams, asked: list[list[int]]) -> tuple[LLM, list[Any]]:
    """A model and its answers, the first of which has had a token without text since then."""
    tokenizer = Breaking()
    llm = LLM(small(vocab=257), weights="bf16", coder=Coder(tokenizer, frozenset()))
    alone = llm.generate(asked, ask)
    own = {*alone[0].tokens, *asked[0]} - {*alone[1].tokens, *asked[1]}
    tokenizer.bad = next(token for token in alone[0].tokens if token in own)
    return llm, alone


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_a_token_without_text_ends_its_own_answer_alone(first: int, stop: tuple[str, ...]):
    asked, ask = [[4, 5], [1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, stop=stop)
    llm, alone = breaking(ask, asked)
    streams = [llm.stream(prompt, ask) for prompt in asked]
    found = {number: list(streams[number]) for number in (first, 1 - first)}
    assert found[0][-1].reason == "error"
    assert "could not be decoded: KeyError: 'no token" in str(found[0][-1].error)
    assert "".join(piece.text for piece in found[1]) == alone[1].text
    assert not llm.engine.busy
    assert not llm._answers


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_of_several_answers_those_that_have_text_are_given(stop: tuple[str, ...]):
    asked, ask = [[4, 5], [1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, stop=stop)
    llm, alone = breaking(ask, asked)
    broken, whole = llm.generate(asked, ask)
    assert broken.reason == "error"
    assert "could not be decoded" in str(broken.error)
    assert whole.text == alone[1].text
    asked[0] = [llm.coder._inner.bad]  # type: ignore[union-attr]
    assert [answer.reason for answer in llm.generate(asked, ask)] == ["error", "length"]


class Job:
    """Answers to a file, in a cycle: the garbage collector alone closes its generator."""

    def __init__(self, llm: LLM, lines: list[str]) -> None:
        self.answers = self.run(llm, lines)

    def run(self, llm: LLM, lines: list[str]) -> Iterator[dict[str, Any]]:
        self.llm = llm
        yield from answer_lines(llm, lines, GREEDY)


def test_a_generator_that_is_collected_in_the_middle_of_a_step(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    llm = engine(max_requests=2)
    expected = llm.generate([4, 5, 6], GREEDY)[0].tokens
    request.addfinalizer(gc.enable)
    gc.disable()  # until the step
    schedule, left, found = llm.engine.scheduler.schedule, list[int](), list[list[int]]()
    job = Job(llm, ['{"prompt": [1, 2], "max_tokens": 2}', *['{"prompt": [1, 2]}'] * 5])
    next(job.answers)
    del job

    def collects() -> Any:
        if not left:
            before = len(llm._left)
            gc.collect()
            left.append(len(llm._left) - before)
        return schedule()

    monkeypatch.setattr(llm.engine.scheduler, "schedule", collects)
    asking = threading.Thread(
        target=lambda: found.append(llm.generate([4, 5, 6], GREEDY)[0].tokens), daemon=True
    )
    asking.start()
    asking.join(60)
    assert not asking.is_alive(), "it waits for itself"
    assert left == [5]
    assert found == [expected]
    assert llm.engine.pool.used_count == 0
    assert not llm._answers


def test_who_leaves_while_another_has_the_engine_is_gone_once_it_is_free():
    llm = engine()
    stream, other = llm.stream([1, 2], GREEDY), llm.stream([4, 5, 6], GREEDY)
    next(stream)
    with llm._alone():
        closing = threading.Thread(target=stream.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), "closing waits for a step"
        assert len(llm._answers) == 2
    assert len(llm._answers) == 1
    other.close()
    assert llm.engine.pool.used_count == 0


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("what", "nth"), [("update", 1), ("update", 4), ("cancel", 1)])
def test_ctrl_c_leaves_no_request_and_no_half_of_a_step(
    what: str, nth: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, params = LLM(small(), max_requests=2), SamplingParams(max_tokens=12, temperature=0)
    given = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    wanted = [x.tokens for x in llm.generate(given, params)]
    place = llm.engine.scheduler if what == "update" else llm.engine
    real, calls = getattr(place, what), []

    def pressing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(place, what, pressing)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream(given[0], params)) if streamed else llm.generate(given, params)
    assert not llm._answers
    assert llm.engine.pool.used_count == 0
    assert [x.tokens for x in llm.generate(given, params)] == wanted


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("streamed", [False, True])
def test_ctrl_c_does_not_wait_for_the_step_of_another_thread(streamed: bool) -> None:
    llm = LLM(small(), max_requests=2)
    wanted = llm.generate([1, 2, 3], GREEDY)[0].tokens
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with llm._lock, pytest.raises(KeyboardInterrupt):
        list(llm.stream([1, 2, 3], GREEDY)) if streamed else llm.generate([1, 2, 3], GREEDY)
    assert llm.generate([1, 2, 3], GREEDY)[0].tokens == wanted
    assert not llm._answers
    assert llm.engine.pool.used_count == 0
