"""The report of `lz dist-test` as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lezero.jobs.dist_test import Report
from lezero.report.units import count, rate, size, span


def text(report: Report) -> str:
    """Where the ranks are, what is right, how fast it is, and what codec auto would answer."""
    hosts = report.topology.hosts.ranks
    where = ", ".join("+".join(map(str, host)) for host in hosts)
    if report.ranks == 1:
        return "1 rank: it has nobody to exchange with, so nothing was tested. Give --np 2 or more."
    lines = [f"{report.ranks} ranks on {len(hosts)} host{'s' * (len(hosts) != 1)} ({where})", ""]
    rows = [["level", "latency", "bandwidth"]]
    for level in report.topology.levels:
        rows.append([level.name, span(level.latency_s), rate(level.bytes_per_s, "B/s")])
    lines += [_columns(rows), ""]
    rows = [["right?", "topology", "compared", ""]]
    for one in report.checks:
        verdict = "right" if not one.wrong else "WRONG"
        rows.append([one.name, one.topology, str(one.compared), verdict])
    lines += [_columns(rows), ""]
    for one in report.checks:
        lines += [f"wrong: {one.topology}, {one.name}, {text}" for text in one.wrong[:4]]
    rows = [["fp32, medians of 3", "topology", "level", "tensor", "took", "predicted", "× it", ""]]
    for row in report.timed:
        rows.append(
            [
                *(row.operation, row.topology, row.level, size(row.nbytes)),
                *(span(row.seconds), span(row.predicted_s)),
                *(f"{row.seconds / row.predicted_s:.2f}", rate(row.bytes_per_s, "B/s")),
            ]
        )
    lines += [_columns(rows)]
    if report.answer is not None:
        lines += ["", *_auto(report)]
    lines += ["", "All collectives are right." if report.right else "Some collectives are wrong."]
    return "\n".join(lines)


def _auto(report: Report) -> list[str]:
    answer = report.answer
    assert answer is not None
    lines = [
        f"Codec auto, {count(answer.parameters)} parameters, gradients all-reduced in fp32, if "
        f"computation hid nothing: {answer.chosen}",
        f"  {answer.reason}",
    ]
    if answer.candidates:
        rows = [["codec", "a step", ""]]
        for name, figures in answer.candidates.items():
            seconds = figures["s"]
            assert isinstance(seconds, float)
            rows.append([name, span(seconds), str(figures.get("note", ""))])
        lines.append(_columns(rows))
    return lines


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
