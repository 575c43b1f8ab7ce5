"""The policy of codec auto on made-up figures."""

from __future__ import annotations

import math

import pytest

from lezero.comm.choice import (
    PLAIN,
    Candidate,
    Exchange,
    Memory,
    Plain,
    Speed,
    Way,
    choose,
    predict,
)
from lezero.comm.codec import codec

SLOW = Plain(step_s=10.0, waited_s=8.0, wire_s=8.4)  # 0.4 s of the wire are hidden
INT4 = Candidate("int4:64", wire_s=1.1, codec_s=0.05, error=0.1)
SIGN = Candidate("sign:256", wire_s=0.3, codec_s=0.05, error=2.0)


def test_what_pays_within_the_budget_is_chosen() -> None:
    made = choose(SLOW, [INT4, SIGN], budget=0.15)
    assert made.codec == "int4:64"
    assert made.seconds["int4:64"] == pytest.approx(10 - 8 + (1.1 - 0.4) + 0.05)
    assert made.gain == pytest.approx(0.725)
    assert "budget 0.15" in made.refused["sign:256"]
    assert made.figures()["sign:256"]["note"] == made.refused["sign:256"]
    assert choose(SLOW, [INT4, SIGN], budget=3.0).codec == "sign:256"


@pytest.mark.parametrize(
    "plain",
    [
        Plain(step_s=1.0, waited_s=0.0, wire_s=0.5),  # all hidden
        Plain(step_s=1.0, waited_s=0.9, wire_s=0.01),  # it waits for a slow rank, not for bytes
        Plain(step_s=1.0, waited_s=0.06, wire_s=0.06),  # would save 2%
    ],
)
def test_none_where_nothing_pays(plain: Plain) -> None:
    quick = Candidate("int8:256", wire_s=plain.wire_s / 4, codec_s=0.025, error=0.006)
    made = choose(plain, [quick], budget=0.15)
    assert made.codec == PLAIN
    assert made.gain == 0
    assert "no codec saves 3%" in made.reason


def test_errors_that_are_no_number_are_refused() -> None:
    broken = Candidate("int4:64", 0.1, 0.0, math.nan)
    assert choose(SLOW, [broken], budget=10.0).codec == PLAIN


def test_errors_that_were_not_measured_are_refused() -> None:
    made = choose(SLOW, [Candidate("sign:256", 0.3, 0.05, None)], budget=10.0)
    assert made.codec == PLAIN
    assert "not measured" in made.refused["sign:256"]


def test_steps_on_another_wire_hide_as_much() -> None:
    faster = SLOW.moved(0.9)
    assert faster == Plain(pytest.approx(10 - 8 + 0.5), pytest.approx(0.5), 0.9)
    assert SLOW.moved(SLOW.wire_s) == SLOW
    assert SLOW.moved(0.2).waited_s == 0
    assert predict(SLOW, INT4) == SLOW.moved(1.1).step_s + 0.05


def test_seconds_of_the_wire_follow_latency_bytes_and_hosts() -> None:
    traffic = {Exchange("all_reduce", 8000, 4): 2, Exchange("all_gather", 8000, 2): 1}
    way = Way("flat", size=2, hosts=2, latency_s=1e-3, bytes_per_s=1e6)
    sent = 2 * 2 * 16000 + 8000
    assert way.bytes(traffic, None) == sent
    assert way.seconds(traffic, None) == pytest.approx(5e-3 + sent / 1e6)
    int8 = codec("int8")
    assert way.bytes(traffic, int8) == 2 * 2 * int8.bytes(4000) + 8000
    both = Way("hierarchical", size=4, hosts=2, latency_s=0, bytes_per_s=1e6)
    assert both.bytes({Exchange("reduce_scatter", 8000, 4): 1}, None) == 2 * 8000


def test_encoding_counts_what_a_rank_encodes_and_decodes() -> None:
    speed = Speed(encode_s=1.0, decode_s=10.0)
    gathered, scattered = (
        {Exchange(operation, 100, 4): 1} for operation in ("all_gather", "reduce_scatter")
    )
    assert speed.seconds(gathered, 4, 4) == 0
    assert speed.seconds(scattered, 4, 4) == 75 * 11
    assert speed.seconds({Exchange("all_reduce", 100, 4): 1}, 4, 4) == 75 * 11 + 25 * (1 + 40)
    assert speed.gathering(gathered, 4, 4) == 25 * (1 + 40)
    assert speed.gathering(scattered, 4, 4) == 0
    assert Way("flat", 4, 2, 0, 1).partners == 4
    assert Way("hierarchical", 4, 2, 0, 1).partners == 2
    assert speed.seconds(scattered, 4, 2) == 25 * 11


def test_memory_counts_copies_and_sums() -> None:
    memory = Memory(latency_s=1.0, bytes_per_s=100.0)
    sums, gathers = (
        {Exchange(operation, 400, 1): 1} for operation in ("reduce_scatter", "all_gather")
    )
    assert memory.seconds(gathers, 4) == 1 + 3
    assert memory.seconds(sums, 4) == 1 + 5 / 2
    assert memory.seconds({Exchange("all_reduce", 400, 1): 2}, 4) == 2 * (2 + 3 + 5 / 2)
    flat, both = Way("flat", 4, 2, 0, 1), Way("hierarchical", 4, 2, 0, 1)
    assert memory.beside(flat, gathers, encoded=False) == 0
    assert memory.beside(flat, sums, encoded=False) == 5 / 2
    assert memory.beside(flat, sums, encoded=True) == 0
    # Two ranks of a host add 200 bytes each, then two hosts 100.
    assert memory.beside(both, sums, encoded=False) == 3 / 2 + 1 + 2 * 3 / 2
    assert memory.beside(both, gathers, encoded=False) == 1 + 2
