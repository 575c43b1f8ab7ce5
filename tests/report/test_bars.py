import math
import xml.etree.ElementTree as ElementTree

from lezero.report import Bar, BarPlot


def test_bars_have_their_share_of_the_largest():
    bars = [Bar("a", 4 * 2**20), Bar("b", 2**20, strong=True), Bar("c", None, "failed")]
    figure = ElementTree.fromstring(BarPlot("Memory", bars, kind="bytes").render())
    widths = [r.get("width") for r in figure.iter("rect") if "bar" in r.get("class")]
    assert widths == ["100.00%", "25.00%"]
    said = "".join(figure.itertext())
    assert "4.00 MiB" in said
    assert "failed" in said


def test_odd_values():
    for bars in ([], [Bar("z", 0.0)], [Bar("n", math.nan), Bar("i", math.inf)], [Bar("-", -1.0)]):
        ElementTree.fromstring(BarPlot("", bars).render())
