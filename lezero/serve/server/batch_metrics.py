"""What a server of batched models counts: for Prometheus, for the page, and for its last words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lezero.serve.batching.runner import Runner
from lezero.serve.server.metrics import Histogram, head

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)


class BatchMetrics:
    """Counts of one server. answered: HTTP answers by route and status."""

    def __init__(self, answered: Counter[tuple[str, int]]) -> None:
        self._answered = answered
        self.latency_s = Histogram(_LATENCY_S)

    def text(self, runner: Runner) -> str:
        """The page that Prometheus reads."""
        lines: list[str] = []
        head(lines, "http_requests_total", "counter", "HTTP answers by route and status.")
        for (route, status), count in sorted(self._answered.items()):
            labels = f'route="{route}",status="{status}"'
            lines.append(f"lezero_http_requests_total{{{labels}}} {count}")
        head(lines, "requests_ended_total", "counter", "Requests by how they ended.")
        for how, count in sorted(runner.counts.ended.items()):
            lines.append(f'lezero_requests_ended_total{{reason="{how}"}} {count}')
        for name, (kind, help, value) in _gauges(runner).items():
            head(lines, name, kind, help)
            lines.append(f"lezero_{name} {value}")
        head(lines, "request_seconds", "histogram", "From arrival to the answer.")
        lines += self.latency_s.lines("lezero_request_seconds")
        return "\n".join(lines) + "\n"

    def stats(self, runner: Runner) -> dict[str, Any]:
        """For the page: counts so far, the plan, and latencies of late in seconds."""
        recent = self.latency_s.recent
        sizes = list(runner.counts.sizes)
        return {
            "target_s": runner.batcher.target_s,
            "latency_s": {"p50": recent(0.5), "p99": recent(0.99)},
            "batch_mean": sum(sizes) / len(sizes) if sizes else None,
            "answered": runner.counts.ended["answered"],
            **{name: value for name, (_, _, value) in _gauges(runner).items()},
        }

    def forecast(self, runner: Runner) -> list[str]:
        """What is expected, before the first client comes."""
        batcher = runner.batcher
        plan, curve = batcher.plan, batcher.curve
        if plan.rate is None:
            return [f"batching    at most {plan.most} a step, delay {_ms(plan.delay_s)}: as asked"]
        mean = sum(runner.model.usual) / len(runner.model.usual)
        lines = [
            f"step        {_ms(curve.seconds(mean))} for one usual request, "
            f"{_ms(curve.seconds(8 * mean))} for 8, measured",
            f"batching    up to {max(1, round(plan.work / mean))} a step, delay "
            f"{_ms(plan.delay_s)}, for 99% within {_ms(batcher.target_s)}",
        ]
        if not plan.rate:
            target = _ms(batcher.target_s)
            return [*lines, f"forecast    no rate holds {target} here; give a higher --p99-ms"]
        many = f"{plan.rate:,.0f}" if plan.rate >= 10 else f"{plan.rate:.2g}"
        rate = f"{many} usual requests a second"
        return [*lines, f"forecast    {rate} of the model alone, HTTP aside"]

    def ended(self, runner: Runner) -> list[str]:
        """What was, beside the target."""
        counts = runner.counts
        lines = [f"ended       {sum(counts.ended.values())} requests, {counts.items} items"]
        p99 = self.latency_s.recent(0.99)
        if p99 is not None:
            mean = counts.items / max(1, counts.steps)
            lines.append(
                f"latency     99% of the last within {_ms(p99)} (target "
                f"{_ms(runner.batcher.target_s)}), {mean:.1f} items a step"
            )
        return lines


def _gauges(runner: Runner) -> dict[str, tuple[str, str, float]]:
    """Name → (kind, help, value)."""
    batcher, counts = runner.batcher, runner.counts
    waiting = batcher.waiting
    return {
        "requests_running": ("gauge", "Requests that run.", max(0, runner.active - waiting)),
        "requests_waiting": ("gauge", "Requests that wait.", waiting),
        "room": ("gauge", "Short requests that may wait, or long ones.", batcher.most_waiting),
        "items_total": ("counter", "Texts or rows answered.", counts.items),
        "steps_total": ("counter", "Passes through the model.", counts.steps),
        "failed_steps_total": ("counter", "Steps that raised an error.", counts.failed_steps),
        "busy_seconds_total": ("counter", "Time in steps.", counts.busy_s),
        "plan_delay_seconds": ("gauge", "How long a step may be waited for.", batcher.plan.delay_s),
        "plan_step_seconds": (
            *("gauge", "How long a full step is expected to take."),
            batcher.full_step_s,
        ),
        "plan_rate": ("gauge", "Requests a second the plan holds.", batcher.plan.rate or 0.0),
        "plans_total": ("counter", "Plans that were made.", batcher.plans),
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
