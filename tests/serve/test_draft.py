"""Speculation with a draft model: the same answers, whatever becomes of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lezero.core.errors import ConfigError
from lezero.models import Transformer
from lezero.serve.answer import Completion
from lezero.serve.draft import DraftModel, best_count
from lezero.serve.llm import LLM
from lezero.serve.paying import WhilePaying
from lezero.serve.program import Fed
from lezero.serve.request import Request
from lezero.serve.sampling import SamplingParams
from lezero.serve.speculate import Speculator
from tests.serve.models import prompts, runs, small
from tests.serve.server.running import coder

KINDS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 4},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
}


def similar(noise: float = 0.05) -> Transformer:
    """A draft that is often right and often wrong."""
    model = small()
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + noise * torch.randn(weight.shape, generator=drawn))
    return model


def drafted(draft: Transformer, **options: object) -> LLM:
    return LLM(small(), weights="bf16", speculate="draft", draft=draft, **options)  # type: ignore[arg-type]


def inner(llm: LLM) -> DraftModel:
    found = llm.engine._speculator
    found = found.inner if isinstance(found, WhilePaying) else found
    assert isinstance(found, DraftModel)
    return found


def always(llm: LLM) -> LLM:
    """The same, without a look at the clock."""
    llm.engine._speculator = inner(llm)
    return llm


def heard(answers: list[Completion]) -> list[object]:
    return [(answer.tokens, answer.reason, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_as_without(kind: str) -> None:
    given = prompts(9)
    params = SamplingParams(max_tokens=40, logprobs=1, **KINDS[kind])  # type: ignore[arg-type]
    plain = heard(LLM(small(), weights="bf16").generate(given, params))
    llm = always(drafted(similar()))
    assert heard(llm.generate(given, params)) == plain
    totals = llm.engine.totals
    assert 0 < totals.accepted < totals.drafted
    assert totals.steps < 40
    assert heard(drafted(similar()).generate(given, params)) == plain


def test_a_draft_of_another_shape() -> None:
    given = prompts(4, longest=300)
    params = SamplingParams(max_tokens=12, temperature=0)
    draft = small(dim=32, layers=1, heads=2, kv_heads=1, ffn=64, context=200)
    expected = LLM(small(), weights="bf16").generate(given, params)
    found = always(drafted(draft)).generate(given, params)
    assert heard(found) == heard(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_draft_is_always_right(kind: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **KINDS[kind])  # type: ignore[arg-type]
    llm = always(drafted(small()))
    llm.generate(prompts(5), params)
    totals = llm.engine.totals
    assert totals.drafted > 80
    assert totals.accepted == totals.drafted


def test_what_a_draft_reads_of_an_answer_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs may round prompts otherwise (`prompts_apart`)."""
    llm, given, seen = always(drafted(similar())), prompts(1)[0], list[tuple[int, int, int]]()
    draft = inner(llm)
    run = draft.program.run

    def noted(fed: Sequence[Fed]) -> torch.Tensor:
        seen.extend((one.position, len(one.tokens), one.prompt) for one in fed)
        return run(fed)

    monkeypatch.setattr(draft.program, "run", noted)
    stream = llm.stream(given, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    for number, _ in enumerate(stream):
        if number == 3:
            draft.close()  # so that it follows anew, from the middle of the answer
    assert max(count for position, count, _ in seen if position > 0) > 2
    for position, count, prompt in seen:
        assert min(prompt, count) == min(max(0, len(given) - position), count)


def test_preempted_requests_are_drafted_again() -> None:
    given, params = prompts(6, longest=60), SamplingParams(max_tokens=40, temperature=0)
    plain = heard(LLM(small(), weights="bf16").generate(given, params))
    roomy = drafted(similar())
    each = 2 * roomy.program.block_bytes
    llm = always(drafted(similar(), cache_bytes=9 * each))
    assert heard(llm.generate(given, params)) == plain
    assert llm.engine.totals.preempted > 0
    assert llm.engine.totals.accepted > 0
    draft = inner(llm)
    draft.guess([])
    draft.pool.check([])


def test_stop_strings_and_requests_that_leave() -> None:
    given = prompts(6)
    options = {"weights": "bf16", "coder": coder()}
    params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
    text = LLM(small(vocab=257), **options).generate(given, params)[0].text  # type: ignore[arg-type]
    stopped = SamplingParams(max_tokens=60, seed=3, ignore_eos=True, stop=(text[20:23],))
    plain = LLM(small(vocab=257), **options).generate(given, stopped)  # type: ignore[arg-type]
    assert plain[0].reason == "stop"
    llm = LLM(
        small(vocab=257),
        speculate="draft",
        draft=small(vocab=257),
        **options,  # type: ignore[arg-type]
    )
    stream = llm.stream(given[1], params)
    next(stream)
    found = llm.generate(given, stopped)
    assert [answer.text for answer in found] == [answer.text for answer in plain]
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.pool.used_count == 0
    draft = inner(llm)
    draft.guess([])
    draft.pool.check([])


def test_a_new_request_finds_what_the_draft_has_seen() -> None:
    llm = always(drafted(small()))
    params = SamplingParams(max_tokens=8, temperature=0)
    fed: list[int] = []
    run = inner(llm).program.run

    def counted(given: Any) -> Any:
        fed.append(sum(len(one.tokens) for one in given))
        return run(given)

    runs(inner(llm).program, counted)
    prompt = prompts(1, longest=100, seed=8)[0] + [5] * 40
    llm.generate([prompt], params)
    first = sum(fed)
    llm.generate([prompt], params)
    assert sum(fed) - first < first - 40


def test_what_the_draft_has_seen_is_found_by_its_owner_alone() -> None:
    draft, prompt = inner(drafted(small())), [5] * 40

    def shared(salt: str) -> int:
        request = Request("a", [*prompt, 7], SamplingParams(temperature=0), salt=salt)
        request.computed = len(prompt)
        fed: list[int] = []
        run = draft.program.run
        runs(draft.program, lambda given: fed.append(len(given[0].tokens)) or run(given))
        draft.guess([request])
        runs(draft.program, run)
        request.tokens.append(8)
        draft.guess([request])
        draft.guess([])
        return len(request.prompt) - fed[0]

    assert [shared(salt) for salt in ("alice", "bob", "alice")] == [0, 0, 32]


def refilled(rows: int) -> Transformer:
    """`similar()` with more or fewer rows at the end of its vocabulary."""
    model = similar(0.02)
    vocab = model.config.vocab
    found = small(vocab=vocab + rows)
    state = model.state_dict()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in state:
            own = found.state_dict()[name] * 100  # likely, if it were asked
            own[: min(vocab, vocab + rows)] = state[name][: vocab + rows]
            state[name] = own
    found.load_state_dict(state)
    return found


@pytest.mark.parametrize("rows", [-3, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_vocabularies_may_be_filled_up_by_other_numbers_of_rows(kind: str, rows: int) -> None:
    vocab = small().config.vocab
    given = [*prompts(5), [1, 2, vocab - 1, 3], [4, 5, vocab - 2]]
    params = SamplingParams(max_tokens=40, logprobs=1, **KINDS[kind])  # type: ignore[arg-type]
    plain = heard(LLM(small(), weights="bf16").generate(given, params))
    llm = always(drafted(refilled(rows)))
    assert heard(llm.generate(given, params)) == plain
    assert llm.engine.totals.accepted > 0


def test_what_cannot_be_a_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft: got none"):
        LLM(small(), speculate="draft")
    with pytest.raises(ConfigError, match="draft: got a model for speculate 'off'"):
        LLM(small(), draft=small())
    with pytest.raises(ConfigError, match="draft: has 1200 tokens, but the model 97"):
        LLM(small(), speculate="draft", draft=small(vocab=1200))


def test_the_forecast_counts_the_draft() -> None:
    llm = drafted(small(), cache_bytes=1 << 20)
    draft = inner(llm).program
    kept = llm.engine.pool.count * draft.block_bytes
    assert llm.forecast.cache_bytes + kept <= 1 << 20
    assert llm.forecast.draft_bytes == draft.weight_bytes + kept
    assert llm.forecast.draft_cache_bytes == kept
    assert any(line.startswith("draft") for line in llm.forecast.lines())


def test_how_many_to_guess() -> None:
    counts = [best_count(share, 0.1) for share in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 8
    assert best_count(0.8, 0.5) < best_count(0.8, 0.02)


class _Guesser(Speculator):
    """Counts how often it is asked; finds a guess at each, or at every `every`-th time."""

    def __init__(self, every: int = 1) -> None:
        self.times, self._every = 0, every

    def guess(self, requests: Sequence[Request]) -> None:
        self.times += bool(requests)
        for request in requests:
            request.drafts = () if self.times % self._every else (1,)


def played(
    gate: WhilePaying, guesser: _Guesser, now: list[float], guessing: tuple[int, float]
) -> tuple[bool, int, float]:
    """A step of one request: a token a second, or what guessing brings in its time."""
    before = guesser.times
    gate.guess([Request("a", [1])])
    tokens, seconds = guessing if guesser.times > before else (1, 1.0)
    now[0] += seconds
    gate.checked(tokens, False)
    now[0] += 100  # what lies between steps does not count
    return guesser.times > before, tokens, seconds


@pytest.mark.parametrize(
    ("guessing", "bound"), [((3, 1.5), 0.53), ((1, 1.4), 1.02), ((2, 3.0), 1.02)]
)
def test_guessing_steps_aside_when_it_does_not_pay(
    guessing: tuple[int, float], bound: float
) -> None:
    guesser, now = _Guesser(), [0.0]
    gate = WhilePaying(guesser, lambda: now[0])
    tokens = seconds = 0.0
    for _ in range(5000):
        _, new, took = played(gate, guesser, now, guessing)
        tokens, seconds = tokens + new, seconds + took
    assert seconds / tokens < bound


def test_a_step_for_which_nothing_was_found_shows_what_doing_without_takes() -> None:
    guesser, now = _Guesser(every=2), [0.0]
    gate = WhilePaying(guesser, lambda: now[0])
    for step in range(1, 61):
        played(gate, guesser, now, (3, 1.5) if step % 2 == 0 else (1, 1.0))
    assert guesser.times == 60  # no step was spent on a trial without
    asked = [
        played(gate, guesser, now, (1, 1.5) if guesser.times % 2 else (1, 1.0))[0]
        for _ in range(900)
    ]
    assert sum(asked[300:]) < 60


def test_guessing_comes_back_when_it_pays_again() -> None:
    guesser, now = _Guesser(), [0.0]
    gate = WhilePaying(guesser, lambda: now[0])
    for _ in range(100):
        played(gate, guesser, now, (1, 1.5))
    assert not played(gate, guesser, now, (1, 1.5))[0]
    for _ in range(200):
        played(gate, guesser, now, (3, 1.5))
    assert played(gate, guesser, now, (3, 1.5))[0]


def test_steps_with_prompts_are_not_compared() -> None:
    guesser, now = _Guesser(), [0.0]
    gate = WhilePaying(guesser, lambda: now[0])
    for _ in range(100):
        gate.guess([Request("a", [1])])
        now[0] += 9
        gate.checked(1, True)
    assert guesser.times == 100
