"""A forecast as text for a terminal."""

from __future__ import annotations

from lezero.plan.forecast import Forecast, size
from lezero.report.units import within

_MEANING = {
    "parameters": "weights that this rank keeps",
    "gradients": "held at the peak",
    "whole copies": "gathered parameters: two blocks by turns, and the rest of the model",
    "wire buffers": "gradients on their way",
    "feedback": "errors of encoding, kept",
    "optimizer": "state of the optimizer",
    "activations": "kept for backward",
    "buffers": "temporaries, buffers of the model",
    "pool": "kept by the host pool, and holes between blocks",
    "allocator": "holes between blocks",
    "libraries": "kernels' own scratch",
    "checkpoint": "copy in host memory while one is written",
}
_TIMES = {
    "forward": "forward",
    "backward": "backward",
    "update": "norm, clipping, optimizer",
    "dispatch": "between kernels",
    "communication": "between ranks",
    "codec": "encoding and decoding",
}


def render(forecast: Forecast) -> str:
    """Tables of memory and time, what the run will take, and whether it fits."""
    memory_error = forecast.stated_error["memory"]
    time_error = forecast.stated_error["time"]
    ranks = "1 rank" if forecast.ranks == 1 else f"{forecast.ranks} ranks"
    if forecast.stage is not None:
        ranks += f", ZeRO stage {forecast.stage}"
    lines = [
        f"{_parameters(forecast.parameters)} parameters, {forecast.precision}, {forecast.form}, "
        f"attention by {forecast.attention}, {ranks}, {forecast.tokens_per_step:,} tokens a step",
        "",
        f"Peak memory of a rank ({within(memory_error)})",
    ]
    for name, count in forecast.memory_parts.items():
        lines.append(f"  {name:<14}{size(count):>11}   {_MEANING.get(name, '')}".rstrip())
    share = forecast.memory_bytes / forecast.limit_bytes if forecast.limit_bytes else float("inf")
    lines += [
        f"  {'total':<14}{size(forecast.memory_bytes):>11}   {share:.0%} of "
        f"{size(forecast.limit_bytes)} free for a rank",
        "",
        f"Time of a step ({within(time_error)})",
    ]
    for name, seconds in forecast.time_parts.items():
        share = seconds / forecast.step_seconds if forecast.step_seconds else 0.0
        lines.append(f"  {name:<14}{duration(seconds):>11}   {share:>4.0%}  {_TIMES.get(name, '')}")
    lines.append(
        f"  {'total':<14}{duration(forecast.step_seconds):>11}   "
        f"{forecast.tokens_per_s:,.0f} tokens/s{_rate(forecast)}"
    )
    if forecast.run_seconds is not None:
        lines += ["", f"{forecast.steps:,} steps: {duration(forecast.run_seconds)}"]
    lines += ["", "Fits." if forecast.fits else "Does not fit."]
    return "\n".join(lines)


def _parameters(count: int) -> str:
    """Of a small model exactly, as a run says it."""
    return f"{count:,}" if count < 1e7 else f"{count / 1e6:,.1f}M"


def _rate(forecast: Forecast) -> str:
    if not forecast.step_seconds:
        return ""
    rate = forecast.flops / forecast.step_seconds
    text = f", {rate / 1e9:,.0f} GFLOP/s"
    if forecast.ceiling:
        share = rate / forecast.ceiling
        text += (
            f" ({share:.0%} of the measured ceiling)"
            if share <= 1.1
            else " (the measured ceiling is lower and cannot be right: `lz doctor --refresh`)"
        )
    return text


def duration(seconds: float) -> str:
    """Time for people: 3.1 ms, 12.0 s, 4 min 10 s, 2 h 05 min."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"
