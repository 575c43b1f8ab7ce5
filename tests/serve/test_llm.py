"""The engine against the oracle: the same tokens, whatever else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lezero.core.errors import ConfigError
from lezero.models import generate
from lezero.serve.coder import Coder
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.models import VOCAB, prompts, small
from tests.serve.server.running import coder

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
VARIANTS = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {"attention_bias": "qkv", "tied": False},
    "qwen3": {"qk_norm": True, "head_dim": 32},
}
FORMS = ("bf16", "int8", "int4")


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_in_fp32_equals_the_oracle(name):
    given = prompts(20)
    expected = generate(small(**VARIANTS[name]), given, 64)
    llm = LLM(small(**VARIANTS[name]), weights="fp32")
    found = llm.generate(given, SamplingParams(temperature=0, max_tokens=64))
    assert [answer.tokens for answer in found] == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weights", ["fp32", *FORMS])
def test_the_default_dtype_of_a_program_changes_no_answer(weights, dtype):
    given = prompts(5)
    asked = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=3),
        SamplingParams(top_p=0.9, seed=1, max_tokens=12, repetition_penalty=1.2),
    ] * 2

    def answers(llm):
        return [(x.tokens, x.logprobs) for x in llm.generate(given, asked[:5])]

    llm = LLM(small(), weights=weights)
    expected, before = answers(llm), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert answers(llm) == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("more", [{}, {"min_p": 0.2}])
def test_drawn_tokens_equal_the_oracle(more):
    given = prompts(6)
    options = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 5, **more}
    expected = [generate(small(), [prompt], 32, **options)[0] for prompt in given]
    found = LLM(small(), weights="fp32").generate(given, SamplingParams(max_tokens=32, **options))
    assert [answer.tokens for answer in found] == expected


def test_logprobs_in_fp32():
    given = prompts(3)
    model = small()
    for prompt, answer in zip(
        given, LLM(small(), weights="fp32").generate(given, GREEDY), strict=True
    ):
        logits = model(torch.tensor([prompt + answer.tokens]))[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert answer.logprobs is not None
        found = torch.tensor([entry.logprob for entry in answer.logprobs])
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_bf16_is_near_fp32(name):
    model = small(**VARIANTS[name])
    given = prompts(8)
    tokens = generate(model, given, 8)
    llm = LLM(small(**VARIANTS[name]), weights="bf16")
    plain = small(**VARIANTS[name]).bfloat16()
    mine, theirs = [], []
    for prompt, answer in zip(given, tokens, strict=True):
        whole = torch.tensor([prompt + answer])
        exact = model(whole)[0].log_softmax(-1)
        theirs.append((plain(whole)[0].float().log_softmax(-1) - exact).abs().mean())
        mine.append((_logits(llm, prompt + answer).log_softmax(-1) - exact).abs().mean())
    assert sum(mine) <= 1.1 * sum(theirs)


def _logits(llm: LLM, tokens: list[int]) -> torch.Tensor:
    from lezero.serve.program import Fed

    blocks = llm.engine.pool.allocate(-(-len(tokens) // 16))
    found = llm.program.run([Fed(tokens, 0, blocks, range(len(tokens)))])
    llm.engine.pool.release(blocks)
    return found


@pytest.mark.parametrize(("weights", "kv"), [*((form, "bf16") for form in FORMS), ("bf16", "int8")])
def test_answers_are_bitwise_the_same_alone_in_a_batch_and_after_preemption(weights, kv):
    given = prompts(32, longest=60)
    given = [[1, 2, 3] * 12 + prompt for prompt in given]  # with a prefix in common
    alone = []
    for prompt in given[:4]:
        alone += LLM(small(), weights=weights, kv=kv).generate([prompt], GREEDY)
    roomy = LLM(small(), weights=weights, kv=kv)
    tight = LLM(small(), weights=weights, kv=kv, cache_bytes=14 * roomy.program.block_bytes)
    together, again = roomy.generate(given, GREEDY), roomy.generate(given[:4], GREEDY)
    preempted = tight.generate(given[:6], GREEDY)
    assert tight.engine.totals.preempted > 0
    assert all(answer.cached_tokens >= 32 for answer in again)
    for index, one in enumerate(alone):
        for other in (together[index], again[index], preempted[index]):
            assert other.tokens == one.tokens
            assert other.logprobs == one.logprobs
    for llm in (roomy, tight):
        llm.engine.scheduler.check()
        assert llm.engine.pool.used_count == 0


@pytest.mark.parametrize("weights", FORMS)
def test_answers_are_bitwise_the_same_with_two_threads(weights):
    given = prompts(8, longest=200)
    sampled = SamplingParams(max_tokens=12, seed=3, top_p=0.9, logprobs=2)
    found = []
    for threads in (1, 2):
        llm = LLM(small(dim=256, ffn=384, vocab=2003), weights=weights)
        torch.set_num_threads(threads)
        answers = llm.generate(given, GREEDY) + llm.generate(given, sampled)
        torch.set_num_threads(1)
        found.append([(answer.tokens, answer.logprobs) for answer in answers])
    assert found[0] == found[1]


def test_several_answers_to_one_prompt_are_the_same_after_preemption():
    params = SamplingParams(max_tokens=40, seed=3, logprobs=0)

    def answers(llm: LLM, samples: range) -> list[object]:
        asked = [llm.request([4, 5, 6] * 13, params, sample) for sample in samples]
        begun = [llm.begin(request) for request in asked]
        while llm.engine.busy:
            llm.advance()
        for answer in begun:
            llm.end(answer)
        llm.engine.scheduler.check()
        assert llm.engine.pool.used_count == 0
        return [(request.answer, request.logprobs, request.reason) for request in asked]

    roomy = LLM(small(), weights="bf16")
    tight = LLM(small(), weights="bf16", cache_bytes=9 * roomy.program.block_bytes)
    alone = [answers(roomy, range(n, n + 1))[0] for n in range(4)]
    assert len({str(answer) for answer in alone}) == 4
    assert answers(LLM(small(), weights="bf16"), range(4)) == alone
    assert answers(tight, range(4)) == alone
    assert tight.engine.totals.preempted > 0


def test_speculation_changes_no_token():
    given = [[5, 6, 7, 8] * 6, *prompts(5)]
    for params in (GREEDY, SamplingParams(max_tokens=40, seed=3, top_k=4)):
        plain = LLM(small(), weights="bf16").generate(given, params)
        llm = LLM(small(), weights="bf16", speculate="lookup")
        assert [a.tokens for a in llm.generate(given, params)] == [a.tokens for a in plain]
        assert llm.engine.totals.accepted > 0


def test_a_stream_is_the_same_answer_and_ends_when_it_is_closed():
    llm = LLM(small(), weights="bf16")
    whole = llm.generate([4, 5, 6], GREEDY)[0]
    pieces = list(llm.stream([4, 5, 6], GREEDY))
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert pieces[-1].reason == whole.reason == "length"
    stream = llm.stream([4, 5, 6], GREEDY)
    next(stream)
    stream.close()
    assert llm.engine.pool.used_count == 0
    assert not llm.engine.busy


def test_the_cache_and_the_prompt_are_checked():
    llm = LLM(small(), weights="bf16", context=64)
    with pytest.raises(ConfigError, match="max_tokens: got 128"):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=128))
    for wrong in (VOCAB, 10**30):
        with pytest.raises(
            ConfigError, match=f"stop_token_ids: holds .*allowed is 0 to {VOCAB - 1}"
        ):
            llm.stream([1], SamplingParams(stop_token_ids=(0, VOCAB - 1, wrong)))
    with pytest.raises(ConfigError, match=f"prompt: holds token {VOCAB}, allowed is 0 to"):
        llm.generate([1, VOCAB], GREEDY)
    for long in (10**30, -(10**5000)):  # Python does not even write the second
        with pytest.raises(ConfigError, match="prompt: holds a token of more than 30 digits"):
            llm.generate([1, long], GREEDY)
    with pytest.raises(ConfigError, match="this model has no tokenizer"):
        llm.generate("hello", GREEDY)
    with pytest.raises(ConfigError, match="weights: got 'int3'"):
        LLM(small(), weights="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="context: got 4096"):
        LLM(small(), context=4096)
    assert not llm.engine.busy


@pytest.mark.parametrize("options", [{"context": 64}, {"cache_bytes": 20_000}])
def test_a_limit_that_nobody_gave_ends_where_context_or_cache_do(options):
    llm = LLM(small(vocab=257), weights="bf16", coder=coder(), **options)
    room = llm.room
    assert 32 < room < 128
    unsaid = SamplingParams(temperature=0, ignore_eos=True)
    prompts = [[5] * (room - 1), [5] * (room - 9), [5]]
    for params in (unsaid, SamplingParams.parse(unsaid.to_dict() | {"max_tokens": 1})):
        found = llm.generate(prompts, [params, unsaid, unsaid])
        assert [len(answer.tokens) for answer in found] == [1, 9, room - 1]
        assert {answer.reason for answer in found} == {"length"}
    assert sum(len(piece.tokens) for piece in llm.stream("abc", unsaid)) == room - 3
    asked = [{"role": "user", "content": "hello"}]
    answer = llm.chat(asked, unsaid)
    assert len(answer.tokens) == room - answer.prompt_tokens
    assert llm.generate([5], None)[0].reason is not None
    for params in (None, unsaid):
        with pytest.raises(ConfigError, match=rf"^prompt: got {room} tokens, allowed is 1 to"):
            llm.generate([5] * room, params)
    assert "max_tokens" not in unsaid.model_fields_set, "what was given is as it was"


@pytest.mark.parametrize("given", [{"a": "b"}, {"a", "b"}, frozenset("ab")])
def test_prompts_without_an_order_are_refused(given):
    llm = LLM(small(vocab=257), weights="bf16", coder=coder())
    for ask in (llm.generate, llm.embed):
        with pytest.raises(ConfigError, match=f"prompts: got {type(given).__name__}, allowed are"):
            ask(given)


def test_arrays_are_refused_with_the_remedy():
    llm = LLM(small(vocab=257), weights="bf16", coder=coder())
    tokens = [5, 6, 7]
    for array in (torch.tensor(tokens), np.array(tokens)):
        for given in (array, array[None], array[0], [array], list(array)):
            with pytest.raises(ConfigError, match=r"prompts?(\[0\])?: .*\.tolist\(\)"):
                llm.generate(given, GREEDY)
        with pytest.raises(ConfigError, match=r"prompt: .*\.tolist\(\)"):
            llm.stream(array, GREEDY)
        assert llm.generate(array.tolist(), GREEDY)[0].prompt_tokens == 3
    assert len(llm.generate(np.array(["ab", "c"]), GREEDY)) == 2


def test_an_empty_text_begins_with_the_tokenizers_own_end_token():
    inner = coder()._inner
    llm = LLM(small(vocab=257), weights="bf16", coder=Coder(inner, frozenset([3, inner.eos])))
    assert list(llm.request("", GREEDY).prompt) == [inner.eos]
    llm.coder = Coder(inner, frozenset([inner.eos]), start_tokens=(7,))
    assert list(llm.request("", GREEDY).prompt) == [7]
    llm.coder = Coder(inner, frozenset())
    with pytest.raises(ConfigError, match="prompt: got 0 tokens"):
        llm.generate("", GREEDY)


def test_nan_ends_one_request_only():
    model = small()
    with torch.no_grad():
        model.embed_tokens.weight[7] = math.nan
    found = LLM(model, weights="fp32").generate([[1, 2, 3], [4, 7, 5], [8, 9]], GREEDY)
    assert found[1].reason == "error"
    assert "NaN" in str(found[1].error)


def test_the_forecast_counts_what_is_there():
    llm = LLM(small(), weights="int8", context=100, max_requests=3)
    found = llm.forecast
    assert found.token_bytes == 2 * 2 * 2 * 2 * 16
    assert found.cache_tokens == 3 * 112
    assert found.largest == 3
    assert len(found.lines()) == 7 + found.disturbed  # a line says so where ceilings were
