"""How the errors of configs read where a field takes one of several types."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import pytest
from pydantic import Field

from lezero.core.config import Config
from lezero.core.errors import ConfigError
from lezero.jobs.compress_config import CompressConfig


class Inner(Config):
    size: int | Literal["row", "all"] = 1


class Unions(Config):
    inner: Inner = Inner()
    perhaps: Inner | None = None
    smooth: float | Literal["auto"] | None = None
    share: Annotated[float, Field(ge=0)] | tuple[str, ...] = 0.0
    many: tuple[int | Literal["x"], ...] = ()
    pair: tuple[int, float | Literal["y"] | None] = (1, 1.0)
    table: dict[str, float | tuple[str, ...]] = {}  # noqa: RUF012  (pydantic copies defaults)
    deep: tuple[tuple[int | Literal["q"], ...] | Literal["all"], ...] = ()
    section: Inner | tuple[int, ...] | None = None
    two: Inner | Config | None = None
    numbered: tuple[int, int] | dict[int, int] | None = None
    nested: Annotated[int | Literal["z"], Field()] | None = None


SAID = {
    "a word": ({"smooth": "no"}, "smooth: got 'no', allowed is a valid number, 'auto' or null"),
    "no number": (
        {"smooth": math.nan},
        "smooth: got nan, allowed is a finite number, 'auto' or null",
    ),
    "true": ({"smooth": True}, "smooth: got True, allowed is a valid number, 'auto' or null"),
    "true of a list": (
        {"share": True},
        "share: got True, allowed is a valid number or a list: values in brackets",
    ),
    "a limit": (
        {"share": -1},
        "share: got -1, allowed is greater than or equal to 0 or a list: values in brackets",
    ),
    "inside": ({"share": ["a", 2]}, "share.1: got 2, allowed is a valid string"),
    "nested": (
        {"inner": {"size": "q"}},
        "inner.size: got 'q', allowed is a valid integer, 'row' or 'all'",
    ),
    "optional": (
        {"perhaps": {"size": "q", "siz": 1}},
        "perhaps.size: got 'q', allowed is a valid integer, 'row' or 'all'; "
        "perhaps.siz: unknown key; did you mean 'size'?",
    ),
    "a list": (
        {"many": ["x", 1, "z", "y"]},
        "many.2: got 'z', allowed is a valid integer or 'x'; "
        "many.3: got 'y', allowed is a valid integer or 'x'",
    ),
    "a pair": ({"pair": [1, "z"]}, "pair.1: got 'z', allowed is a valid number, 'y' or null"),
    "a table": (
        {"table": {"float": {}, "b": [1]}},
        "table.float: got {}, allowed is a valid number or a list: values in brackets; "
        "table.b.0: got 1, allowed is a valid string",
    ),
    "deep": (
        {"deep": [["q", "z"], "all", 3]},
        "deep.0.1: got 'z', allowed is a valid integer or 'q'; "
        "deep.2: got 3, allowed is a list: values in brackets or 'all'",
    ),
    "a section": (
        {"section": {"size": []}},
        "section.size: got [], allowed is a valid integer, 'row' or 'all'",
    ),
    "of two": ({"two": 3}, "two: got 3, allowed is a section: keys with values or null"),
    "numbered": ({"numbered": {7: "q"}}, "numbered.7: got 'q', allowed is a valid integer"),
    "annotated": ({"nested": "y"}, "nested: got 'y', allowed is a valid integer or 'z'"),
    "two fields": (
        {"inner": 3, "smooth": "no"},
        "inner: got 3, allowed is a section: keys with values; "
        "smooth: got 'no', allowed is a valid number, 'auto' or null",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_a_union_says_in_one_line_what_all_its_branches_allow(name: str) -> None:
    given, said = SAID[name]
    with pytest.raises(ConfigError) as told:
        Unions.parse(given)
    assert str(told.value) == f"config: {said}"
    for problem in told.value.problems:
        assert ".".join(map(str, problem.path)) in said


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("smooth: nope", "smooth: got 'nope', allowed is a valid number, 'auto' or null"),
        ("smooth: .nan", "smooth: got nan, allowed is a finite number, 'auto' or null"),
        ("group: true", "group: got True, allowed is a valid integer or 'row'"),
    ],
)
def test_a_scheme_names_fields_that_are_there(tmp_path, scheme: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{model: m, out: o, scheme: nf4}")
    given = f"scheme={{kind: int8_weight_activation, {scheme}}}"
    with pytest.raises(ConfigError) as told:
        CompressConfig.load(path, [given])
    assert str(told.value) == f"{path}: scheme.{said}"
