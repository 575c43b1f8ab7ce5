"""The figures of a finished or running run that several parts of its report need."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from lezero.report import Mark
from lezero.report.units import count, percent, span
from lezero.train.run_documents import RunDocuments, mapping, real


@dataclass(frozen=True)
class Compared:
    """A forecast beside what was measured."""

    forecast: float | None
    measured: float | None
    stated: float | None

    @property
    def error(self) -> float | None:
        """How far the forecast is from the measurement, as a fraction of it."""
        if self.forecast is None or not self.measured:
            return None
        return self.forecast / self.measured - 1

    @property
    def tone(self) -> str:
        if self.error is None or self.stated is None:
            return ""
        return "good" if abs(self.error) <= self.stated else "warn"

    def verdict(self) -> str:
        if self.error is None:
            return "cannot be compared"
        side = "above" if self.error >= 0 else "below"
        return f"{percent(abs(self.error))} {side} measured"


class RunFacts:
    """The figures that several sections need."""

    def __init__(self, run: RunDocuments) -> None:
        self.run, self.metrics = run, run.metrics
        m = self.metrics
        self.steps, self.losses = m.steps, m.column("loss")
        self.finite_losses = [v for v in self.losses if math.isfinite(v)]
        self.validation = self._validation()
        totals = m.known("total_steps")[1]
        self.total = int(totals[-1]) if totals and math.isfinite(totals[-1]) else None
        self.resumes = m.happened("resume")
        self.marks = [
            Mark(float(e["step"]), "resumed") for e in self.resumes if real(e, "step") is not None
        ]
        seconds = [v for v in m.known("seconds")[1] if math.isfinite(v)]
        self.seconds = sum(seconds)
        self.since = self._since()
        times = self.forecast_steps("seconds")[1]
        settled = times[min(5, len(times) // 5) :]
        memory = self.forecast_steps("memory_bytes")[1]
        for event in m.happened("checkpoint"):
            copy, step = real(event, "memory_bytes"), real(event, "step")
            if copy is not None and (step is None or step > self.since):
                memory.append(copy)
        self.memory = Compared(
            real(run.forecast, "memory_bytes"),
            max(memory, default=None),
            real(run.forecast, "stated_error", "memory"),
        )
        self.step_time = Compared(
            real(run.forecast, "step_seconds"),
            statistics.median(settled) if settled else None,
            real(run.forecast, "stated_error", "time"),
        )

    def _since(self) -> float:
        """The step after which every step is of the run that the forecast is of: that of the last
        resume with another config or on another machine, or of an earlier one since."""
        since = -math.inf
        for event in self.resumes:
            step = real(event, "step")
            if step is not None:
                since = step if event.get("changed") is True else min(since, step)
        return since

    def forecast_steps(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that the forecast is of, and a figure of them."""
        pairs = [
            (step, value)
            for step, value in zip(*self.metrics.known(name), strict=True)
            if step > self.since and math.isfinite(value)
        ]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def _validation(self) -> tuple[list[int], list[float]]:
        """Validation losses of the step lines and of events, one a step."""
        found = dict(zip(*self.metrics.known("validation_loss"), strict=True))
        for event in self.metrics.happened("validation"):
            step, loss = real(event, "step"), real(event, "loss")
            if step is not None and loss is not None:
                found.setdefault(int(step), loss)
        steps = sorted(step for step, loss in found.items() if math.isfinite(loss))
        return steps, [found[step] for step in steps]

    def middle(self, name: str) -> float | None:
        """The median of a figure over all steps."""
        values = [v for v in self.metrics.known(name)[1] if math.isfinite(v)]
        return statistics.median(values) if values else None

    def subtitle(self) -> str:
        if not self.metrics.steps:
            return "no steps recorded yet"
        last = self.metrics.steps[-1]
        of = f" of {self.total:,}" if self.total else ""
        tokens = sum(v for v in self.metrics.known("tokens")[1] if math.isfinite(v))
        parts = [f"{last:,}{of} steps", f"{count(tokens)} tokens" if tokens else ""]
        parts.append(f"{span(self.seconds)} in steps" if self.seconds else "")
        forecast = mapping(self.run.forecast)
        parameters, ranks = real(forecast, "parameters"), real(forecast, "ranks")
        parts.append(f"{count(parameters)} parameters" if parameters else "")
        parts.append(str(forecast.get("precision") or ""))
        parts.append(f"{ranks:.0f} ranks" if ranks and ranks > 1 else "")
        return " · ".join(part for part in parts if part)
