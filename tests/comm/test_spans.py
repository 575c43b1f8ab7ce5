"""Spans of a buffer: cut where a chunk ends, joined where neighbours lie side by side."""

from __future__ import annotations

from lezero.comm.route import Span
from lezero.comm.spans import cut, joined, scattered


def test_spans_are_cut_where_a_chunk_ends() -> None:
    spans = (Span("a.weight", 0, 100, 0), Span("b/odd.bias", 0, 57, 100))
    assert cut(spans, 90, 120, 0) == (
        Span("a.weight", 90, 100, 0),
        Span("b/odd.bias", 0, 20, 10),
    )
    assert cut(spans, 157, 168, 0) == ()
    assert cut(spans, 0, 10, 50) == (Span("a.weight", 0, 10, 50),)


def test_spans_join_where_they_are_neighbours_in_both() -> None:
    spans = (Span("a", 4, 8, 4), Span("b", 0, 2, 8), Span("a", 0, 4, 0), Span("b", 2, 4, 20))
    found = joined(spans)
    assert found == (Span("a", 0, 8, 0), Span("b", 0, 2, 8), Span("b", 2, 4, 20))
    assert scattered(found) == found[1:]
