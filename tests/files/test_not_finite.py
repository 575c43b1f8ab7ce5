"""Numbers that are not finite go through JSON and back, and nothing else is taken for one."""

import json
import math

import pytest

from lezero.files.not_finite import read, written

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "value",
    [
        INF,
        -INF,
        {"best": INF, "more": [1, -INF, {"a": [INF]}], "none": None},
        {"$float": "inf"},
        {"$float": "what"},
        {"$float": INF},
        {"$float": {"$float": "inf"}},
        {"$float": {"$float": [{"$float": -INF}]}},
        {"$float": "inf", "other": 1},
        {"$float": [1.5, INF], "$other": "nan"},
        "inf",
        ["nan", 1e308, True],
    ],
)
def test_it_comes_back_as_it_was(value):
    text = json.dumps(written(value), allow_nan=False)
    assert read(json.loads(text)) == value


def test_nan_and_tuples():
    found = read(json.loads(json.dumps(written({"a": (NAN, 2)}), allow_nan=False)))
    assert math.isnan(found["a"][0])
    assert found["a"][1] == 2


@pytest.mark.parametrize(
    "value", [{"$float": "1e9"}, {"$float": 3}, {"$float": {}}, {"$float": None}, {"$float": []}]
)
def test_what_was_never_written_is_left_as_it_is(value):
    assert read(value) == value
