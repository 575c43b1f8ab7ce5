"""`report.html`: one run on one page, from the files in its folder."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError, LeZeroError
from lezero.core.paths import read_regular, shown
from lezero.report import Bar, BarPlot, Level, LinePlot, Page, Section, Series, Tile, tag
from lezero.report import decisions as recorded
from lezero.report.decision_cards import decision_cards
from lezero.report.thin import smooth
from lezero.report.units import count, number, percent, rate, size, span, within
from lezero.train.run_documents import RunDocuments, mapping, real
from lezero.train.run_events import event_rows
from lezero.train.run_facts import Compared, RunFacts

FILE = "report.html"
_FOOTER = "Written {} by LeZero."
_SMOOTH_FROM = 60
_MOST_BYTES = 64 << 20
_BYTES = ("memory, ", "cpu, caches, ")
_CURVES = {"losses": "this run", "plain_losses": "plain PyTorch"}


def write_report(run_folder: str | Path) -> Path:
    """Writes `report.html` into a run folder and returns its path.

    A document that is missing or damaged costs its section only, which says so. Raises `FileError`
    when there is no such folder, nothing of a run in it, a page that is no such report lies there,
    or it cannot be written.
    """
    run = RunDocuments.read(run_folder)
    if (run.folder / FILE).exists() and not _is_report(run.folder / FILE):
        raise FileError(
            f"{run.folder / FILE}: was not written by LeZero, as far as it says, and the report "
            "would be written over it; move it away, or name the folder of a run"
        )
    facts = RunFacts(run)
    footer = _FOOTER.format(time.strftime("%Y-%m-%d %H:%M"))
    page = Page(f"Run {run.folder.resolve().name}", facts.subtitle(), footer)
    page.tiles(_tiles(facts))
    _loss(page.section("Loss"), facts)
    _sample(page.section("Sample text"), run)
    _forecast(page.section("Forecast against measured"), facts)
    _speed(page.section("Speed"), facts)
    _learning(page.section("Learning rate and gradient"), facts)
    _decisions(page.section("Decisions"), run)
    _proof(page.section("Proof"), run)
    _events(page.section("What happened"), facts)
    _hardware(page.section("Hardware"), run)
    _config(page.section("Config"), run)
    return page.write(run.folder / FILE)


def _is_report(path: Path) -> bool:
    end = f"{_FOOTER.rpartition('{}')[2]}</footer>".encode()
    try:
        return end in read_regular(path, _MOST_BYTES)
    except (OSError, LeZeroError):
        return False


def _tiles(facts: RunFacts) -> list[Tile]:
    m, tiles = facts.metrics, []
    if m.steps:
        first = f"from {number(facts.finite_losses[0])}" if facts.finite_losses else ""
        tiles.append(Tile("Final training loss", number(_final(facts.losses)), first))
    steps, losses = facts.validation
    if losses:
        best = min(range(len(losses)), key=losses.__getitem__)
        note = f"best {number(losses[best])} at step {steps[best]:,}"
        tiles.append(Tile("Validation loss", number(losses[-1]), note))
    if (speed := facts.middle("tokens_per_s")) is not None:
        tiles.append(Tile("Throughput", f"{count(speed)} tok/s", "median over all steps"))
    if (share := facts.middle("share_of_ceiling")) is not None:
        tiles.append(Tile("Share of the GEMM ceiling", percent(share), "measured on this machine"))
    if facts.memory.measured is not None:
        tiles.append(_against("Peak memory", size, facts.memory))
    if facts.step_time.measured is not None:
        tiles.append(_against("Time a step", span, facts.step_time))
    resumed = len(facts.resumes)
    at = ", ".join(f"{int(mark.x):,}" for mark in facts.marks[-4:])
    tiles.append(Tile("Resumes", str(resumed), f"at step {at}" if at else "never interrupted"))
    if m.steps:
        tone, skipped = ("warn", len(m.skipped)) if m.skipped else ("good", 0)
        note = "loss or gradient not finite" if skipped else "every update was finite"
        tiles.append(Tile("Skipped steps", str(skipped), note, tone))
    return tiles


def _against(label: str, say: Any, compared: Compared) -> Tile:
    if compared.forecast is None:
        return Tile(label, say(compared.measured), "no forecast")
    note = f"forecast {say(compared.forecast)}, {compared.verdict()}"
    return Tile(label, say(compared.measured), note, compared.tone)


def _final(losses: Sequence[float]) -> float:
    """The mean of the last losses, so that one noisy batch does not decide."""
    finite = [v for v in losses[-min(20, max(1, len(losses) // 20)) :] if math.isfinite(v)]
    return statistics.fmean(finite) if finite else math.nan


def _no_metrics(section: Section, facts: RunFacts) -> bool:
    if facts.metrics.steps:
        return False
    why = facts.run.missing.get("metrics.jsonl")
    section.missing(f"metrics.jsonl: {why}." if why else "metrics.jsonl: no step recorded yet.")
    return True


def _loss(section: Section, facts: RunFacts) -> None:
    if _no_metrics(section, facts):
        return
    series = _smoothed("training", facts.steps, facts.losses)
    if facts.validation[1]:
        series.append(Series("validation", *facts.validation, dots=True, color=1))
    section.plots(LinePlot("Loss", series, marks=facts.marks, height=290))


def _smoothed(name: str, steps: Sequence[int], values: Sequence[float]) -> list[Series]:
    """A noisy curve pale behind its running mean; a short one as it is."""
    if len(values) < _SMOOTH_FROM:
        return [Series(name, steps, values, color=0)]
    mean = smooth(values, max(8, len(values) // 40))
    return [
        Series(name, steps, values, faint=True, color=0),
        Series(f"{name}, running mean", steps, mean, color=0),
    ]


def _sample(section: Section, run: RunDocuments) -> None:
    items = run.sample if isinstance(run.sample, list) else []
    shown = [item for item in items if isinstance(item, Mapping)]
    if not shown:
        section.missing(run.say("sample.json") if run.sample is None else "No sample was written.")
    for item in shown[:20]:
        prompt, text = str(item.get("prompt") or ""), str(item.get("text") or "")
        text = text.removeprefix(prompt)
        section.add(tag("div", tag("span", prompt, class_="prompt"), text, class_="sample"))


def _forecast(section: Section, facts: RunFacts) -> None:
    run, memory, times = facts.run, facts.memory, facts.step_time
    if not mapping(run.forecast):
        section.missing(run.say("forecast.json"))
    else:
        rows = [
            _compared_row("Peak memory of a rank, above imports", size, memory),
            _compared_row("Time a step", span, times),
        ]
        headers = ("", "Forecast", "Measured", "Forecast is", "Stated error", "Held")
        section.table(headers, rows, numbers="-nnnn")
    steps, values = facts.forecast_steps("memory_bytes")
    if values:
        levels = []
        if memory.forecast is not None:
            label, low, high = "forecast peak", None, None
            if memory.stated:
                off = memory.stated * memory.forecast
                label = f"forecast peak, {within(memory.stated)}"
                low, high = max(0.0, memory.forecast - off), memory.forecast + off
            levels.append(Level(memory.forecast, label, low, high))
        plot = LinePlot(
            "Memory",
            [Series("measured", steps, values)],
            kind="bytes",
            zero=True,
            levels=levels,
            marks=[mark for mark in facts.marks if mark.x >= facts.since],
        )
        section.plots(plot)
    parts = [
        BarPlot(title, bars, kind=kind)
        for title, key, kind in (
            ("Where the memory goes", "memory_parts", "bytes"),
            ("Where the time goes", "time_parts", "seconds"),
        )
        if (bars := _parts(mapping(run.forecast, key)))
    ]
    if parts:
        section.plots(*parts)


def _compared_row(label: str, say: Any, compared: Compared) -> tuple[object, ...]:
    held = {"good": "yes", "warn": "no"}.get(compared.tone, "n/a")
    return (
        label,
        say(compared.forecast),
        say(compared.measured),
        compared.verdict(),
        "n/a" if compared.stated is None else within(compared.stated),
        tag("strong", held, class_=compared.tone or None),
    )


def _parts(parts: Mapping[str, Any]) -> list[Bar]:
    known = [(str(name), value) for name in parts if (value := real(parts, name)) is not None]
    total = sum(value for _, value in known)
    known.sort(key=lambda item: -item[1])
    return [
        Bar(name.replace("_", " "), value, percent(value / total) if total else "", strong=True)
        for name, value in known
    ]


def _speed(section: Section, facts: RunFacts) -> None:
    if _no_metrics(section, facts):
        return
    steps, speed = facts.metrics.known("tokens_per_s")
    plots = [
        LinePlot(
            "Throughput",
            _smoothed("tokens/s", steps, speed),
            kind="count",
            unit="tok/s",
            zero=True,
            marks=facts.marks,
        )
    ]
    steps, share = facts.metrics.known("share_of_ceiling")
    if share:
        plots.append(
            LinePlot(
                "Share of the measured GEMM ceiling",
                _smoothed("share", steps, share),
                kind="percent",
                zero=True,
                marks=facts.marks,
            )
        )
    else:
        steps, seconds = facts.metrics.known("seconds")
        plots.append(
            LinePlot(
                "Time a step",
                _smoothed("seconds", steps, seconds),
                kind="seconds",
                zero=True,
                marks=facts.marks,
            )
        )
    section.plots(*plots)


def _learning(section: Section, facts: RunFacts) -> None:
    if _no_metrics(section, facts):
        return
    steps, rates = facts.metrics.known("lr")
    norm_steps, norms = facts.steps, facts.metrics.column("grad_norm")
    positive = [v for v in norms if v > 0 and math.isfinite(v)]
    wild = bool(positive) and max(positive) > 30 * statistics.median(positive)
    section.plots(
        LinePlot("Learning rate", [Series("learning rate", steps, rates)], zero=True),
        LinePlot(
            "Gradient norm",
            _smoothed("gradient norm", norm_steps, norms),
            log=wild,
            zero=not wild,
            marks=facts.marks,
        ),
    )


def _decisions(section: Section, run: RunDocuments) -> None:
    if run.decisions is None:
        section.missing(run.say("decisions.json"))
        return
    try:
        recorded.check(run.decisions, "decisions.json")
    except LeZeroError as error:
        section.missing(f"{error}.")
        return
    records = recorded.pick(run.decisions, None)
    if not records:
        section.missing("This run had nothing to decide.")
        return
    section.text("What LeZero chose by itself. Bars show the measured figures; shorter is better.")
    section.add(decision_cards(records))
    section.text(tag("code", f"lz why {shown(run.folder)}"), " prints the same on a terminal.")


def _proof(section: Section, run: RunDocuments) -> None:
    if run.verify is None:
        if run.missing.get("verify.json") != "not there":
            section.missing(run.say("verify.json"))
        else:
            section.missing("This run was not compared with plain PyTorch; lz verify does that.")
        return
    data = mapping(run.verify)
    told = next((data[k] for k in ("equal", "ok", "passed") if isinstance(data.get(k), bool)), None)
    words = next((data[k] for k in ("verdict", "summary") if isinstance(data.get(k), str)), None)
    if words is not None or told is not None:
        default = "Agrees with plain PyTorch." if told else "Differs from plain PyTorch."
        section.note(words or default, tone="" if told is None else "good" if told else "bad")
    told_already = ("verdict", "summary", "format", *_CURVES)
    section.facts(_flat({k: v for k, v in data.items() if k not in told_already and v != {}}))
    curves = [Series(name, range(1, len(y) + 1), y) for key, name in _CURVES.items()
              if len(y := _reals(data.get(key))) > 1]  # fmt: skip
    if curves:
        section.plots(LinePlot("Loss of the compared steps", curves))


def _reals(values: object) -> list[float]:
    items = values if isinstance(values, list) else []
    return [v if (v := real({"": item}, "")) is not None else math.nan for item in items]


def _events(section: Section, facts: RunFacts) -> None:
    torn = facts.metrics.torn
    events = [
        e for e in facts.metrics.events if e["event"] != "skipped" or not facts.metrics.skipped
    ]
    if facts.metrics.skipped:
        rows = [(f"{step:,}", why) for step, why in sorted(facts.metrics.skipped.items())]
        section.table(("Skipped step", "Why"), rows[-50:], numbers="n-")
    if events:
        section.table(("When", "Step", "What", "Detail"), event_rows(events), numbers="-n")
    elif not facts.metrics.skipped:
        section.missing("Nothing out of the ordinary was recorded.")
    if torn:
        section.note(f"{torn} line(s) of metrics.jsonl could not be read, as a kill leaves them.")


def _hardware(section: Section, run: RunDocuments) -> None:
    facts, ceilings = mapping(run.hardware, "facts"), mapping(run.hardware, "ceilings")
    if not facts and not ceilings:
        section.missing(run.say("hardware.json"))
        return
    if facts:
        section.facts(_flat({k: v for k, v in facts.items() if k != "machine_id"}))
    if ceilings:
        section.add(tag("h3", "Measured ceilings"))
        section.facts(_ceilings(ceilings))


def _ceilings(ceilings: Mapping[str, Any]) -> dict[str, str]:
    """The single figures of the measured ceilings; curves and cost tables are left out."""
    out = {}
    for name in ceilings:
        value, label = real(ceilings, name), name.replace("_", " ").replace("gemm", "GEMM")
        if name.startswith("gemm") and not isinstance(ceilings[name], list):
            unit = "OP/s" if "int" in name else "FLOP/s"
            out[label] = "not measured" if value is None else rate(value, unit)
        elif value is not None and name.startswith(("memory", "disk", "h2d", "d2h")):
            out[label] = rate(value, "B/s")
        elif value is not None and name in ("threads", "cpu_share"):
            out[label] = number(value)
        elif value is not None and name == "op_overhead":
            out[label] = span(value)
    return out


def _flat(data: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested facts as one list of names and readable values."""
    out: dict[str, str] = {}
    for key, value in data.items():
        name = f"{before}{key}".replace("_", " ")
        if isinstance(value, Mapping) and before.count(",") < 4:
            out.update(_flat(value, f"{name}, "))
        elif isinstance(value, bool):
            out[name] = "yes" if value else "no"
        elif isinstance(value, list):
            out[name] = ", ".join(map(_item, value)) or "none"
        elif isinstance(value, int | float):
            is_bytes = name.endswith("bytes") or name.startswith(_BYTES)
            out[name.removesuffix(" bytes")] = size(value) if is_bytes else number(value)
        else:
            out[name] = "n/a" if value is None else str(value)
    return out


def _item(value: object) -> str:
    return " ".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)


def _config(section: Section, run: RunDocuments) -> None:
    if run.config is None:
        section.missing(run.say("config.yaml"))
    else:
        section.code(run.config.rstrip())
