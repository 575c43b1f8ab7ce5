import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezero.report.markup import Markup, escape, join, plain, tag


def test_text_is_escaped_and_markup_is_not():
    made = tag("p", "a < b & c", tag("b", "x"), class_="n", data_plot='"<')
    assert made == '<p class="n" data-plot="&quot;&lt;">a &lt; b &amp; c<b>x</b></p>'
    assert tag("p", hidden=None) == "<p></p>"
    assert tag("br") == "<br/>"


@given(st.text(), st.text())
def test_any_text_survives_as_the_same_text(text, value):
    made = tag("p", text, title=value)
    parsed = ElementTree.fromstring(made)
    assert (parsed.text or "") == plain(text)
    assert parsed.get("title", "").split() == plain(value).split()


@pytest.mark.parametrize("bad", ["\x1b[31mred", "\x00", "\ud800", "\x9b1m", "\uffff"])
def test_control_characters_do_not_reach_a_page_or_a_terminal(bad):
    assert "\ufffd" in plain(bad)
    plain(bad).encode()
    assert plain("a\r\nb\tc") == "a\nb\tc"


def test_join_keeps_markup():
    assert join("<", Markup("<b/>"), 3) == "&lt;<b/>3"
    assert escape("'") == "&#39;"
