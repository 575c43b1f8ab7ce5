"""Ceilings of the right products, and what was measured beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lezero.core import device, facts
from lezero.core.errors import ConfigError
from lezero.core.facts import Facts
from lezero.profiler.ceilings import Ceilings, ReadPoint
from lezero.profiler.hardware import Hardware
from lezero.report.units import size
from lezero.serve import forecast as module
from lezero.serve.forecast import compared, tried_lines
from lezero.serve.llm import LLM
from lezero.serve.rehearsal import Pace, Paces
from lezero.serve.sampling import SamplingParams
from tests.serve.models import small

MEASURED = Ceilings("cpu", 1, "2", gemm_fp32=1e11, gemm_bf16=1e9, memory_read=1e10)


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(found: Ceilings | None) -> None:
        facts: Any = Facts
        monkeypatch.setattr(module, "hardware", lambda measure: Hardware(facts, found))

    return give


def test_prefill_is_bounded_by_the_fastest_products(ceilings: Any) -> None:
    llm = LLM(small(), weights="bf16")
    ceilings(MEASURED)  # bf16 products are slow where the processor has none
    assert llm.forecast.prefill_tokens_s == 1e11 / (2 * llm.program.products)
    ceilings(replace(MEASURED, gemm_bf16=4e11, gemm_int8=9e11))
    assert llm.forecast.prefill_tokens_s == 4e11 / (2 * llm.program.products)
    ceilings(None)
    assert llm.forecast.prefill_tokens_s is None


def test_a_whole_context_is_slower(ceilings: Any) -> None:
    llm = LLM(small(context=1024), weights="bf16", context=1000)
    ceilings(replace(MEASURED, gemm_bf16=4e11, gemm_int8=9e11))
    found, program, c = llm.forecast, llm.program, llm.program.config
    read = program.read_bytes + 1000 * 2 * 2 * c.layers * c.kv_heads * c.head_dim
    assert found.full_decode_tokens_s == pytest.approx(1e10 / read)
    operations = 2 * (program.products + 500 * 2 * c.layers * c.heads * c.head_dim)
    assert found.full_prefill_tokens_s == pytest.approx(4e11 / operations)
    decode, prefill = found.lines()[-2:]
    assert decode.endswith(f"for one request; behind 999 tokens {1e10 / read:,.0f}")
    assert prefill.endswith(f"tokens/s; of 999 at once {4e11 / operations:,.0f}")
    brief = LLM(small(), weights="bf16", context=8).forecast.lines()[-2:]
    assert not any("behind" in line or "at once" in line for line in brief)


def test_a_window_bounds_what_a_whole_context_costs(ceilings: Any) -> None:
    llm = LLM(small(context=1024, sliding_window=64), weights="bf16", context=1000)
    ceilings(MEASURED)
    program, c = llm.program, llm.program.config
    read = program.read_bytes + 64 * 2 * 2 * c.layers * c.kv_heads * c.head_dim
    assert llm.forecast.full_decode_tokens_s == pytest.approx(1e10 / read)
    seen = (64 * 64 / 2 + 936 * 64) / 1000
    operations = 2 * (program.products + seen * 2 * c.layers * c.heads * c.head_dim)
    assert llm.forecast.full_prefill_tokens_s == pytest.approx(1e11 / operations)


def test_ceilings_of_another_device_say_nothing(
    ceilings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(small(), weights="bf16")
    ceilings(MEASURED)
    assert llm.forecast.decode_tokens_s is not None
    monkeypatch.setattr(device, "device", lambda: torch.device("cuda", 0))
    assert (llm.forecast.decode_tokens_s, llm.forecast.prefill_tokens_s) == (None, None)
    words = "not known; lz doctor measures how fast this machine can be"
    told = [x for x in llm.forecast.lines() if x.startswith(("decode", "prefill"))]
    assert told == [f"decode      {words}", f"prefill     {words}"]


def test_the_cache_is_within_what_the_process_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts.memory()
    monkeypatch.setattr(facts, "memory", lambda *_: replace(before, available=1 << 20))
    left = LLM(small())
    assert 0 < left.forecast.cache_bytes <= 0.3 * (1 << 20)
    assert LLM(small(), cache_bytes=1 << 20).forecast.cache_bytes == 1 << 20
    with pytest.raises(ConfigError, match=r"got 2097152 bytes \(2.00 MiB, 2 MiB\), but only 1.00"):
        LLM(small(), cache_bytes=2 << 20)


def test_more_memory_than_there_is_is_no_cache() -> None:
    for bytes_ in (2 * facts.memory().total, 1 << 50):
        with pytest.raises(
            ConfigError, match=r"cache_bytes \(--cache-mib of lz serve\): got .* are free"
        ):
            LLM(small(), cache_bytes=bytes_)


def test_more_requests_than_a_step_has_tokens_are_named() -> None:
    with pytest.raises(ConfigError, match="max_requests: got 5000, allowed is 1 to 256"):
        LLM(small(), max_requests=5000)


def test_disturbed_ceilings_are_told(ceilings: Any) -> None:
    llm = LLM(small(), weights="bf16")
    ceilings(MEASURED)
    assert not any("other programs" in line for line in llm.forecast.lines())
    ceilings(replace(MEASURED, cpu_share=0.5))
    assert any("other programs" in line for line in llm.forecast.lines())


@pytest.mark.parametrize(("context", "requests"), [(100, 32), (17, 8), (16, 8), (1, 4), (500, 4)])
def test_so_many_requests_of_a_whole_context_fit(context: int, requests: int) -> None:
    llm = LLM(small(), weights="bf16", context=context, max_requests=requests)
    pool = llm.engine.pool
    assert llm.forecast.largest == pool.count // max(1, pool.blocks_for(context - 1))
    assert llm.forecast.largest >= requests


def test_where_no_whole_context_fits_what_does_is_told() -> None:
    small_cache = 3 * LLM(small(), weights="bf16").program.block_bytes
    llm = LLM(small(), weights="bf16", cache_bytes=small_cache)
    assert llm.forecast.largest == 0
    assert any("a request of 49 tokens at most" in line for line in llm.forecast.lines())
    ask = SamplingParams(max_tokens=9, ignore_eos=True)
    assert len(llm.generate([[1] * 40], ask)[0].tokens) == 9
    with pytest.raises(ConfigError):
        llm.generate([[1] * 41], ask)


def test_guesses_are_told_beside_the_ceiling(ceilings: Any) -> None:
    plain, looking = (LLM(small(), speculate=x) for x in ("off", "lookup"))
    drafted = LLM(small(), speculate="draft", draft=small(layers=1))
    ceilings(MEASURED)
    said = [
        next(line for line in llm.forecast.lines() if line.startswith("decode"))
        for llm in (plain, looking)
    ]
    before, _, behind = said[0].partition("; behind")
    assert before.endswith("tokens/s for one request")
    with_right = " without guesses, and with right ones 7 times as fast"
    assert said[1] == f"{before}{with_right}; behind{behind}"
    assert looking.forecast.faster == 7
    assert drafted._draft is not None
    cost = drafted._draft.read_bytes / drafted.program.read_bytes
    assert drafted.forecast.faster == pytest.approx(9 / (1 + 8 * cost))
    seen = Paces(alone=Pace(10, 1.0), guessing=Pace(60, 1.0))
    lines = compared(looking.forecast, seen, Paces())
    assert "of the forecast's ceiling" in lines[0]
    assert lines[1] == "guesses     60 tokens/s in steps that had some"
    same = LLM(small(), speculate="draft", draft=small(layers=3))
    assert same.forecast.faster == 1.0


def test_what_was_measured_is_compared(ceilings: Any) -> None:
    llm = LLM(small(), weights="bf16")
    ceilings(MEASURED)
    found = llm.forecast
    assert found.decode_tokens_s is not None
    seen = Paces(
        alone=Pace(round(found.decode_tokens_s / 2 * 1e3), 1e3),
        drawn=Pace(30, 1.0),
        filling=Pace(10, 1.0),
    )
    tried = Paces(alone=Pace(round(found.decode_tokens_s * 1e3), 1e3), drawn=Pace(40, 1.0))
    lines = compared(found, seen, tried, taken=3 << 20, cache_share=0.5)
    assert lines.pop(1) == (
        "drawn       30 tokens/s for one alone where chance draws them, 75% of what was tried"
    )
    assert lines[0].endswith("alone, 50% of what was tried, 50% of the forecast's ceiling")
    assert lines[1].startswith("prefill     10 tokens/s, ")
    assert "tried" not in lines[1]
    expected = found.weight_bytes + found.cache_bytes // 2 + found.beside_bytes
    assert lines[2].startswith(f"memory      3.00 MiB taken; forecast {size(expected)} with")
    assert lines[2].endswith("; stated error 10%, at least 32.0 MiB")
    assert compared(found, Paces(), tried) == []


def test_what_was_tried_is_told() -> None:
    tried = Paces(alone=Pace(4000, 1.0), drawn=Pace(1000, 1.0), filling=Pace(20_000, 1.0))
    assert tried_lines(tried) == [
        "tried       tokens/s of one request: 4,000 likeliest, 1,000 drawn by chance, 20,000 of a "
        "prompt",
        "            expect these within 20%, and less behind long texts",
    ]
    assert tried_lines(Paces()) == []
    assert (
        tried_lines(Paces(alone=Pace(1, 2.0)))[0]
        == "tried       tokens/s of one request: 0.5 likeliest"
    )


def test_reading_is_as_fast_as_that_of_as_many_bytes(ceilings: Any) -> None:
    llm = LLM(small(), weights="bf16")
    ceilings(replace(MEASURED, read_curve=(ReadPoint(1, 5e10), ReadPoint(1 << 40, 1e9))))
    assert llm.forecast.decode_tokens_s == 5e10 / llm.program.read_bytes


def test_of_a_drafts_cache_what_was_written_counts(ceilings: Any) -> None:
    ceilings(MEASURED)
    llm = LLM(small(), speculate="draft", draft=small(layers=1), weights="int8")
    assert llm.touched == (0, 0)
    llm.generate([[1, 2, 3]])
    cache_share, draft_share = llm.touched
    assert 0 < draft_share < 1
    found = llm.forecast
    (line,) = compared(
        *(found, Paces(), Paces()), taken=1 << 20, cache_share=cache_share, draft_share=draft_share
    )
    weights = found.weight_bytes + found.draft_bytes - found.draft_cache_bytes
    written = int(draft_share * found.draft_cache_bytes) + int(cache_share * found.cache_bytes)
    expected = weights + found.beside_bytes + written
    assert f"forecast {size(expected)} with the cache" in line


def test_what_opening_took_beside_the_weights_is_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([100 << 20, 150 << 20])
    monkeypatch.setattr("lezero.serve.llm.resident_bytes", lambda: next(taken))
    monkeypatch.setattr(module, "resident_bytes", lambda: next(taken))
    llm = LLM(small(), weights="fp32")
    beside = (50 << 20) - llm.program.weight_bytes + (32 << 20)
    assert llm.forecast.beside_bytes == beside
    said = f"process     {size(beside)}: tokenizer, libraries and what they keep"
    assert said in llm.forecast.lines()
    llm.program.place = torch.device("cuda", 0)
    assert module.beside_bytes(0, llm.program, None) == 0
