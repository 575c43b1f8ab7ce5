"""Prompts from a file: answers in order, and what is wrong with a line stays with it."""

from __future__ import annotations

import json
import os
import signal

import pytest

from lezero.data.tokenizer import bytes_tokenizer
from lezero.serve.coder import Coder
from lezero.serve.llm import LLM
from lezero.serve.offline import answer_lines
from lezero.serve.sampling import SamplingParams
from tests.serve.models import says, small

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def engine(**options: object) -> LLM:
    tokenizer = bytes_tokenizer()
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    coder = Coder(tokenizer, frozenset([tokenizer.eos]), template)
    return LLM(small(vocab=257), weights="bf16", coder=coder, max_requests=3, **options)  # type: ignore[arg-type]


def test_answers_come_in_order_whatever_their_length():
    lines = [
        json.dumps({"prompt": f"line {number} ", "max_tokens": 1 + 7 * number % 12})
        for number in range(40)
    ]
    found = list(answer_lines(engine(), [*lines[:20], "\n", *lines[20:]], GREEDY))
    assert [answer["line"] for answer in found] == [*range(1, 21), *range(22, 42)]
    alone = engine()
    for number in (0, 13, 39):
        params = SamplingParams(temperature=0, max_tokens=1 + 7 * number % 12)
        expected = alone.generate(f"line {number} ", params)[0]
        assert found[number]["text"] == expected.text
        assert found[number]["tokens"] == len(expected.tokens)


def test_an_id_comes_back():
    ids = ["a", 7, None, True, "b"]
    lines = [json.dumps({"prompt": "x", "max_tokens": 2, "id": one}) for one in ids]
    lines.append(json.dumps({"prompt": "x", "id": "c", "temperature": -1}))
    found = list(answer_lines(engine(), lines, GREEDY))
    assert [answer.get("id") for answer in found] == ["a", 7, None, None, "b", "c"]
    assert found[3]["error"] == "line 4: id: got True, allowed is text or a whole number"
    assert ["error" in answer for answer in found] == [False, False, False, True, False, True]


def test_a_bad_line_is_told_and_harms_no_other():
    bad = [
        "{",
        "[1, 2]",
        '{"text": "no prompt"}',
        '{"prompt": "a", "messages": []}',
        '{"prompt": 3}',
        '{"prompt": [1, 5000]}',
        '{"prompt": "a", "temperatur": 0}',
        '{"prompt": "a", "max_tokens": 100000}',
        '{"messages": [{"role": "user"}]}',
        "[" * 100_000,
        r'{"messages": [{"role": "user", "content": "half \ud800"}]}',
    ]
    good = '{"messages": [{"role": "user", "content": "hi"}]}'
    llm = engine()
    found = list(answer_lines(llm, [good, *bad, good], GREEDY))
    assert [number for number, answer in enumerate(found) if "error" not in answer] == [0, 12]
    assert found[0]["text"] == found[12]["text"]
    assert [answer["error"].split(":")[0] for answer in found[1:12]] == [
        f"line {number}" for number in range(2, 13)
    ]
    assert found[1]["error"].startswith("line 2: is no JSON")
    assert "line 8: temperatur: unknown key; did you mean 'temperature'" in found[7]["error"]
    assert "max_tokens" in found[8]["error"]
    assert found[11]["error"].startswith("line 12: messages: holds half of a surrogate pair")
    assert llm.engine.pool.used_count == 0


def test_lines_of_any_file_are_told_what_they_are(monkeypatch):
    monkeypatch.setattr("lezero.serve.offline._LONGEST_LINE", 100)
    good = '{"prompt": "a", "max_tokens": 2}'
    broken = b'{"prompt": "\xff"}'.decode(errors="surrogateescape")
    lines = ["\ufeff" + good, broken, good + " " * 100, good]
    found = list(answer_lines(engine(), lines, GREEDY))
    assert [answer.get("error") for answer in found] == [
        *(None, "line 2: is not UTF-8"),
        *(f"line 3: has {len(good) + 100} characters, allowed are 100", None),
    ]


def test_a_number_that_python_does_not_read_is_told():
    line = f'{{"prompt": "a", "max_tokens": {"9" * 5000}}}'
    (found,) = answer_lines(engine(), [line], GREEDY)
    assert found["error"] == "line 1: has a number of more than 4300 digits"


def test_a_value_that_is_nested_too_deep_is_told():
    deep = f'{{"prompt": "a", "temperature": {"[" * 600}{"]" * 600}}}'
    good = '{"prompt": "a", "max_tokens": 2}'
    found = list(answer_lines(engine(), [deep, good, deep], GREEDY))
    said = "SamplingParams: a value is nested too deep"
    assert [answer.get("error") for answer in found] == [f"line 1: {said}", None, f"line 3: {said}"]


class Panic(BaseException):
    """What tokenizers in Rust raise is no `Exception`."""


class Raising:
    """A tokenizer that raises as those of other packages do, for a text and for a token."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def encode(self, text: str) -> list[int]:
        if "?" in text:
            raise self.kind("no such character")
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        if ord("!") in tokens:
            raise self.kind("piece id is out of range")
        return "".join(map(chr, tokens))


def test_a_name_twice_in_a_line_is_refused():
    lines = [
        '{"prompt": "a", "max_tokens": 2, "prompt": "b"}',
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        '{"prompt": "a", "max_tokens": 2}',
    ]
    found = list(answer_lines(engine(), lines, GREEDY))
    for number, name in ((1, "prompt"), (2, "content")):
        said = f"line {number}: has '{name}' twice in one object; leave one of them out"
        assert found[number - 1]["error"] == said
    assert found[2]["tokens"] == 2


@pytest.mark.parametrize("kind", [Exception, Panic])
@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_what_a_tokenizer_raises_ends_one_line(stop, kind):
    llm = LLM(small(vocab=257), weights="bf16", coder=Coder(Raising(kind), frozenset()))
    named = "Exception" if kind is Exception else "RuntimeError: Panic"
    says(llm.program, 1, [ord(letter) for letter in "abc!"])
    sizes = (2, 4, 3)
    lines = [json.dumps({"prompt": "x", "max_tokens": most, "stop": stop}) for most in sizes]
    lines.insert(1, '{"prompt": "what?"}')
    found = list(answer_lines(llm, lines, GREEDY))
    assert [answer.get("text") for answer in found] == ["ab", None, None, "abc"]
    assert found[1]["error"] == f"line 2: {named}: no such character"
    assert found[2]["error"].endswith(f"decoded: {named}: piece id is out of range")
    assert not llm.engine.busy


def test_few_lines_are_read_ahead_and_their_priorities_count(monkeypatch):
    llm, read, asked = engine(), [], []
    request = llm.request

    def noted(*given, priority=0):
        asked.append(priority)
        return request(*given, priority=priority)

    monkeypatch.setattr(llm, "request", noted)
    lines = (json.dumps({"prompt": "ab", "priority": n}) for n in range(60) if not read.append(n))
    answers = answer_lines(llm, lines, GREEDY)
    next(answers)
    assert len(read) < 20
    assert asked == read
    answers.close()


def test_a_field_with_null_counts_as_left_out():
    plain = {"prompt": "abc", "max_tokens": 3}
    nulls = {"priority": None, "temperature": None, "stop": None, "seed": None, "messages": None}
    asked, expected = answer_lines(engine(), map(json.dumps, [plain | nulls, plain]), GREEDY)
    assert asked == expected | {"line": 1}
    (found,) = answer_lines(engine(), ['{"prompt": "abc", "max_tokens": null}'], GREEDY)
    assert found["tokens"] == GREEDY.max_tokens or found["reason"] == "stop"
    (missing,) = answer_lines(engine(), ['{"prompt": null}'], GREEDY)
    assert "either" in missing["error"]


def test_leaving_early_frees_all_blocks():
    llm = engine()
    answers = answer_lines(llm, ['{"prompt": "abc"}'] * 30, GREEDY)
    next(answers)
    answers.close()
    assert llm.engine.pool.used_count == 0
    assert not llm.engine.busy


def test_log_probabilities_that_are_asked_for_are_given():
    lines = ['{"prompt": "abc", "logprobs": 2, "max_tokens": 3}', '{"prompt": "abc"}']
    asked, plain = answer_lines(engine(), lines, GREEDY)
    assert "logprobs" not in plain
    assert len(asked["logprobs"]) == asked["tokens"] == 3
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    expected = engine().generate("abc", params)[0]
    for told, token, one in zip(asked["logprobs"], expected.tokens, expected.logprobs, strict=True):
        assert told["token"] == token
        assert told["logprob"] == one.logprob
        assert [tuple(pair) for pair in told["likeliest"]] == list(one.likeliest)
    assert json.loads(json.dumps(asked)) == asked


def test_where_nobody_says_answers_are_as_long_as_fits():
    llm = engine(context=40)
    lines = ['{"prompt": "abcdefgh"}', '{"prompt": "abc", "max_tokens": 3}', '{"prompt": "abc"}']
    lines.append(json.dumps({"prompt": "x" * 40}))
    for params in (None, SamplingParams(temperature=0, ignore_eos=True)):
        found = list(answer_lines(llm, lines, params))
        assert [answer.get("prompt_tokens") for answer in found] == [8, 3, 3, None]
        assert "prompt: got 40 tokens, allowed is 1 to 39: the context has 40" in found[3]["error"]
    assert [answer["tokens"] for answer in found[:3]] == [32, 3, 37]
    (asked,) = answer_lines(llm, lines[:1], SamplingParams(max_tokens=100))
    assert "max_tokens" in asked["error"], "what was asked for is not cut down"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_where_a_line_begins_leaves_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, real, begun = engine(), LLM.begin, []

    def pressing(*args: object) -> object:
        begun.append(real(*args))  # type: ignore[arg-type]
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return begun[-1]

    monkeypatch.setattr(LLM, "begin", pressing)
    with pytest.raises(KeyboardInterrupt):
        list(answer_lines(llm, ['{"prompt": "a"}'] * 3, GREEDY))
    assert len(begun) == 2
    assert not llm._answers
    assert not llm.engine.busy
