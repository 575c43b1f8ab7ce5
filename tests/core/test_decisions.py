"""Choices: what wins, what never does, what a resumed run does again, and what is no record."""

from __future__ import annotations

from typing import Any

import pytest

from lezero.core.decisions import FORMAT, Decisions
from lezero.core.errors import ConfigError, FileError, OrderError


def fails() -> float:
    raise RuntimeError("no compiler\nand more lines")


def never() -> float:
    raise AssertionError("measured again")


def test_the_smallest_figure_wins_and_what_fails_is_listed_and_never_chosen() -> None:
    made = Decisions()
    given = {"slow": lambda: 2.0, "broken": fails, "fast": lambda: 1.0}
    assert made.choose("form", given) == "fast"
    record = made.records["form"]
    assert record.reason == "the smallest figure measured"
    assert record.candidates["slow"] == {"s": 2.0}
    assert record.candidates["broken"] == {"s": None, "failed": "no compiler"}
    with pytest.raises(ConfigError, match=r"form: no candidate works .* broken: no compiler"):
        made.choose("form", {"broken": fails})
    with pytest.raises(RuntimeError, match="no compiler"):
        made.choose("form", {"none": fails, "broken": fails}, keep="none")


@pytest.mark.parametrize(("figure", "chosen"), [(0.97, "none"), (0.94, "other"), (1.0, "none")])
def test_doing_something_must_be_worth_its_margin(figure: float, chosen: str) -> None:
    given = {"none": lambda: 1.0, "other": lambda: figure}
    assert Decisions().choose("form", given, keep="none", margin=0.05) == chosen


def test_a_resumed_run_does_as_before_where_it_can_and_what_the_user_says_wins() -> None:
    first = Decisions()
    first.choose("form", {"one": lambda: 1.0, "two": lambda: 2.0}, step=3)
    first.record("pool", "on")
    first.record("kernel", "own")
    again = Decisions.from_json(first.to_json())
    assert again.choose("form", {"one": never, "two": never}) == "one"
    assert again.records["form"].replayed
    assert again.records["form"].candidates == first.records["form"].candidates
    assert again.choose("form", {"one": never, "two": never}, override="two") == "two"
    assert again.records["form"].overridden
    assert again.choose("form", {"two": lambda: 2.0, "three": lambda: 1.0}) == "three"
    assert again.record("kernel", "torch's") == "own"
    assert again.record("kernel", "torch's", overridden=True) == "torch's"
    assert again.record("pool", "off", fact=True) == "off", "it is so here and now"
    with pytest.raises(ConfigError, match="got 'four', allowed is one, two or auto"):
        again.choose("form", {"one": never, "two": never}, override="four")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"format": FORMAT + 1, "decisions": []}, f"format {FORMAT + 1}; this version reads"),
        ({"decisions": []}, "format None; this version reads format 1"),
        ([], "format 'list'"),
        ({"format": FORMAT, "decisions": [{"topic": "form"}]}, "damaged"),
        ({"format": FORMAT, "decisions": [{"chosen": "one"}]}, "damaged"),
    ],
)
def test_what_is_no_record_of_this_format_is_refused(data: Any, told: str) -> None:
    with pytest.raises(FileError, match=told):
        Decisions.from_json(data)


def test_a_rank_that_has_not_joined_measures_nothing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for rank in ("0", "1"):
        for key, value in {**place, "RANK": rank}.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(OrderError, match=f"rank {rank} of 2 and has not joined"):
            Decisions().choose("form", {"one": never})
