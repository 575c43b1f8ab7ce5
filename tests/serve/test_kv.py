"""Keys and values in int8: when they are taken, what they take, and that answers stay good."""

from __future__ import annotations

import math
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from lezero.core.errors import ConfigError, FileError
from lezero.ops.decoder.native import NATIVE
from lezero.serve import kv as kv_module
from lezero.serve.fused import FusedProgram
from lezero.serve.llm import LLM
from lezero.serve.program import Fed
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts, small

pytestmark = pytest.mark.skipif(not NATIVE.able(), reason="no fused kernels for this processor")
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
LAYERS, HEADS, WIDTH = 2, 2, 16
BF16, INT8 = 2 * LAYERS * HEADS * 2 * WIDTH, 2 * LAYERS * HEADS * (WIDTH + 2)
"""Bytes of a token's keys and values in the small model."""


def test_bytes_of_a_token_are_those_of_the_cache():
    for form, each in (("bf16", BF16), ("int8", INT8)):
        llm = LLM(small(), weights="int8", kv=form, context=100, max_requests=3)
        assert isinstance(llm.program, FusedProgram)
        cache = llm.program._cache
        assert cache is not None
        assert llm.forecast.token_bytes == each
        assert llm.forecast.cache_bytes == cache.keys.nbytes + cache.values.nbytes == 336 * each
        assert f"{form} keys and values" in llm.program.description
        assert f"keys/values {form}: as asked" in llm.forecast.lines()


def test_the_same_memory_holds_more_tokens():
    wide, narrow = (LLM(small(), kv=form, cache_bytes=64 * 16 * BF16) for form in ("bf16", "int8"))
    assert wide.engine.pool.count == 64
    assert narrow.engine.pool.count == 64 * BF16 // INT8


def test_auto_is_bf16_where_no_context_is_asked_for_or_it_fits(monkeypatch):
    monkeypatch.setattr(kv_module, "memory_limit", lambda: 1 << 20)
    assert LLM(small()).program.kv == "bf16"
    # 32 requests of 64 tokens take 512 KiB; 30% of 2 MiB are 614 KiB.
    monkeypatch.setattr(kv_module, "memory_limit", lambda: 2 << 20)
    assert LLM(small(), context=64).program.kv == "bf16"
    asked: dict[str, Any] = {"context": 64, "max_requests": 2}
    assert LLM(small(), **asked, cache_bytes=2 * 64 * BF16).program.kv == "bf16"


def test_auto_is_int8_where_bf16_does_not_fit_and_says_so(monkeypatch):
    monkeypatch.setattr(kv_module, "memory_limit", lambda: 1 << 20)
    llm = LLM(small(), context=128)
    assert llm.program.kv == "int8"
    said = "int8: 32 requests of 128 tokens in bf16 take 1.00 MiB, 30% of the memory 307 KiB"
    assert f"keys/values {said}" in llm.forecast.lines()
    llm = LLM(small(), context=128, max_requests=1, cache_bytes=128 * BF16 - 1)
    assert llm.program.kv == "int8"
    assert "cache_bytes" in llm.forecast.kv
    assert LLM(small(), kv="bf16", context=128).program.kv == "bf16"


@pytest.mark.parametrize("drafts", [False, True])
def test_auto_counts_whole_blocks(drafts):
    """A draft takes int8 before the model does: its guesses change no answer."""
    cases: list[tuple[int, str, str]] = [
        (80 * BF16, "bf16", ""),
        (80 * BF16 - 1, "int8", ""),
    ]
    if drafts:
        cases = [
            (80 * (BF16 + BF16), "bf16", "bf16"),
            (80 * (BF16 + BF16) - 1, "bf16", "int8"),
            (80 * (BF16 + INT8), "bf16", "int8"),
            (80 * (BF16 + INT8) - 1, "int8", "int8"),
        ]
    for room, form, form_of_draft in cases:
        asked: dict[str, Any] = {"speculate": "draft", "draft": small()} if drafts else {}
        llm = LLM(small(), **asked, context=65, max_requests=1, cache_bytes=room)
        assert llm.program.kv == form
        assert not drafts or (llm._draft is not None and llm._draft.kv == form_of_draft)
        assert llm.room >= 65


def test_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="kv: got 'int4', allowed are auto, bf16, int8"):
        LLM(small(), kv="int4")  # type: ignore[arg-type]
    for form in ("int8", "bf16"):
        with pytest.raises(ConfigError, match=f"kv: got '{form}'.*plain torch, float32.*take auto"):
            LLM(small(), weights="fp32", kv=form)
    assert LLM(small(), weights="fp32").program.kv == "fp32"


def test_guesses_change_no_token():
    given = [[5, 6, 7, 8] * 6, *prompts(3)]
    plain = LLM(small(), kv="int8").generate(given, GREEDY)
    lookup = LLM(small(), kv="int8", speculate="lookup")
    drafted = LLM(small(), kv="int8", speculate="draft", draft=small())
    assert drafted._draft is not None
    assert drafted._draft.kv == "int8"
    for llm in (lookup, drafted):
        assert [a.tokens for a in llm.generate(given, GREEDY)] == [a.tokens for a in plain]
        assert llm.engine.totals.accepted > 0


def test_a_poisoned_request_harms_no_other():
    given = prompts(3)
    clean = [LLM(small(tied=False), kv="int8").generate([one], GREEDY)[0] for one in given]
    seen = {
        token
        for answer, prompt in zip(clean, given, strict=True)
        for token in prompt + answer.tokens
    }
    poison = next(token for token in range(97) if token not in seen)
    model = small(tied=False)
    with torch.no_grad():
        model.embed_tokens.weight[poison] = math.nan
    # Room for so few that blocks of the poisoned request are used again.
    llm = LLM(model, kv="int8", cache_bytes=12 * 16 * INT8)
    for _ in range(2):
        found = llm.generate([given[0], [poison] * 50, *given[1:]], GREEDY)
        assert found[1].reason == "error"
        for one, other in zip(clean, (found[0], *found[2:]), strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    from lezero.models import packaged_gguf

    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    try:
        path = packaged_gguf()
    except FileError as error:
        pytest.skip(str(error))
    return LLM(path, weights="bf16", context=256, max_requests=1)


def test_smollm2_reads_as_well_with_int8(smollm2: LLM) -> None:
    """Perplexity of Python's language reference; what was measured stands in the lab notes."""
    assert smollm2.coder is not None
    names = sorted(topics)[-30:]
    tokens = smollm2.coder.encode("\n\n".join(topics[name] for name in names))[:256]
    found = {}
    for form in ("bf16", "int8"):
        smollm2.program.keep_kv(form)
        smollm2.program.reserve(16)
        found[form] = smollm2.program.run([Fed(tokens, 0, range(16), range(256))])
    loss = {
        form: torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
        for form, logits in found.items()
    }
    assert 0.99 < math.exp(loss["int8"] - loss["bf16"]) < 1.01
    same = found["int8"].argmax(-1) == found["bf16"].argmax(-1)
    assert same.float().mean() > 0.95
