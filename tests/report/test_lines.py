import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from lezero.report import Level, LinePlot, Mark, Series


def drawn(plot):
    return ElementTree.fromstring(plot.render())


def paths(figure):
    return [p.get("d") for p in figure.iter("path")]


def test_a_gap_lifts_the_pen_and_a_lonely_point_is_a_dot():
    figure = drawn(LinePlot("a", [Series("s", range(6), [1, 2, math.nan, 3, math.inf, 5])]))
    assert paths(figure)[0].count("M") == 3
    assert len(list(figure.iter("circle"))) == 2


def test_legend_levels_marks_and_units():
    plot = LinePlot(
        "Memory",
        [Series("now", [1, 2], [2**30, 2**31]), Series("other <b>", [1, 2], [2**30, 2**30])],
        kind="bytes",
        levels=[Level(2**31, "forecast", 2**30, 3 * 2**30)],
        marks=[Mark(1.5, "resumed & on")],
        zero=True,
    )
    said = "".join(drawn(plot).itertext())
    for text in ("Memory", "GiB", "now", "other <b>", "forecast", "resumed & on", "step"):
        assert text in said


def test_long_series_are_thinned_and_the_script_gets_the_values():
    n = 50_000
    figure = drawn(LinePlot("a", [Series("s", range(n), [i % 7 for i in range(n)])]))
    assert 500 < paths(figure)[0].count("L") <= 1000
    data = json.loads(next(d.get("data-plot") for d in figure.iter("div") if d.get("data-plot")))
    assert data["curves"][0]["name"] == "s"
    across, down, x, y = data["curves"][0]["points"][-1]
    assert (across, x, y) == (1, n - 1, (n - 1) % 7)
    assert 0 <= down <= 1


def test_log_leaves_out_what_has_no_logarithm():
    figure = drawn(LinePlot("a", [Series("s", range(4), [1, 0, 100, 1000])], log=True))
    assert paths(figure)[0].count("M") == 2


@pytest.mark.parametrize("y", [[], [math.nan] * 3, [0.0], [5.0, 5.0], [1e300, -1e300], [1e-320]])
@pytest.mark.parametrize("log", [True, False])
def test_odd_values_are_drawn_or_said_to_be_missing(y, log):
    figure = drawn(LinePlot("a", [Series("s", range(len(y)), y)], log=log))
    for path in paths(figure):
        assert "nan" not in path
        assert "inf" not in path
    if not any(map(math.isfinite, y)):
        assert "no values yet" in "".join(figure.itertext())


def test_no_series_at_all():
    assert "no values yet" in "".join(drawn(LinePlot("a", [])).itertext())
