"""Which elements of which parameters lie where in a buffer: arithmetic of spans."""

from __future__ import annotations

from lezero.comm.route import Span, Spans


def cut(spans: Spans, begin: int, end: int, to: int) -> Spans:
    """The spans of positions `begin` … `end` of a buffer, which lie at `to` of another one."""
    found = []
    for span in spans:
        low, high = max(span.at, begin), min(span.at + span.stop - span.start, end)
        if low < high:
            start = span.start + low - span.at
            found.append(Span(span.name, start, start + high - low, to + low - begin))
    return tuple(found)


def joined(spans: Spans) -> Spans:
    """The same elements in as few spans as can be, by name and start."""
    found: list[Span] = []
    for span in sorted(spans):
        last = found[-1] if found else None
        if (
            last is not None
            and (last.name, last.stop) == (span.name, span.start)
            and last.at + last.stop - last.start == span.at
        ):
            found[-1] = last._replace(stop=span.stop)
        else:
            found.append(span)
    return tuple(found)


def scattered(spans: Spans) -> Spans:
    """Of `joined` spans those whose neighbour in the parameter lies elsewhere in the buffer."""
    ends = {(span.name, span.stop) for span in spans}
    starts = {(span.name, span.start) for span in spans}
    return tuple(
        span
        for span in spans
        if (span.name, span.start) in ends or (span.name, span.stop) in starts
    )


def gaps(spans: Spans, numel: int) -> tuple[tuple[int, int], ...]:
    """What of a buffer no span covers."""
    found, at = [], 0
    for span in sorted(spans, key=lambda span: span.at):
        if at < span.at:
            found.append((at, span.at))
        at = max(at, span.at + span.stop - span.start)
    if at < numel:
        found.append((at, numel))
    return tuple(found)


def overlap(some: Spans, others: Spans) -> bool:
    """Whether an element of a parameter is in both."""
    named: dict[str, list[Span]] = {}
    for span in some:
        named.setdefault(span.name, []).append(span)
    return any(
        span.start < other.stop and other.start < span.stop
        for other in others
        for span in named.get(other.name, ())
    )
