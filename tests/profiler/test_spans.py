"""Spans nest, add up, and cost what they say."""

from __future__ import annotations

import time

import pytest

from lezero.profiler.spans import Spans, span_overhead


def test_spans_nest_and_add_up() -> None:
    spans = Spans()
    for _ in range(3):
        with spans("step"):
            with spans("forward"):
                time.sleep(0.01)
            with spans("backward"), spans("forward"):
                pass
    found = {span.path: span for span in spans.spans()}
    assert list(found) == ["step", "step/backward", "step/backward/forward", "step/forward"]
    step, forward = found["step"], found["step/forward"]
    assert step.count == forward.count == 3
    assert forward.total_s >= 0.03
    assert forward.shortest_s <= forward.mean_s <= forward.longest_s
    assert step.total_s >= forward.total_s
    children = forward.total_s + found["step/backward"].total_s
    assert step.own_s == pytest.approx(step.total_s - children)
    assert set(spans.to_dict()) == set(found)


def test_an_error_closes_its_spans() -> None:
    spans = Spans()
    with pytest.raises(RuntimeError), spans("a"), spans("b"):
        raise RuntimeError
    with spans("c"):
        pass
    assert [span.path for span in spans.spans()] == ["a", "a/b", "c"]


def test_table_and_reset() -> None:
    spans = Spans(synchronize=True)
    with spans("step"), spans("forward"):
        pass
    lines = spans.table().splitlines()
    assert lines[1].startswith("step ")
    assert lines[2].startswith("  forward ")
    spans.reset()
    assert spans.spans() == []


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="span name"):
        Spans()(name)


def test_a_span_is_cheap() -> None:
    cost = min(span_overhead(5000) for _ in range(5))
    print(f"one span: {cost * 1e6:.2f} µs")
    assert 0 < cost < 10e-6
