"""What a server does at this moment, for Prometheus and for the page."""

from __future__ import annotations

from typing import Any

from lezero.serve.llm import LLM
from lezero.serve.server.worker import Worker


def gauges(worker: Worker) -> dict[str, tuple[str, str, float]]:
    """Name → (kind, help, value)."""
    engine = worker.engine
    totals, pool = engine.totals, engine.pool
    running = worker.running
    return {
        "requests_running": ("gauge", "Requests that run.", running),
        "requests_waiting": ("gauge", "Requests that wait.", max(0, worker.active - running)),
        "cache_blocks_used": ("gauge", "Blocks of the cache in use.", pool.used_count),
        "cache_blocks": ("gauge", "Blocks of the cache.", pool.count),
        "steps_total": ("counter", "Passes through the model.", totals.steps),
        "preemptions_total": ("counter", "Steps that took a request's place.", totals.preempted),
        "drafted_tokens_total": ("counter", "Tokens that were guessed.", totals.drafted),
        "accepted_tokens_total": ("counter", "Guesses that were right.", totals.accepted),
        "engine_broken": (
            "gauge",
            "1 when nothing can be answered.",
            int(worker.broken is not None),
        ),
    }


def stats(llm: LLM, worker: Worker, name: str) -> dict[str, Any]:
    """For the page: counts so far, gauges, and latencies of late in seconds."""
    metrics = worker.metrics
    latencies = {
        label: {"p50": histogram.recent(0.5), "p95": histogram.recent(0.95)}
        for label, histogram in (
            ("first_token_s", metrics.first_token_s),
            ("between_tokens_s", metrics.between_tokens_s),
        )
    }
    return {
        "model": name,
        "description": llm.program.description,
        "context": llm.room,
        "chat": llm.coder is not None and llm.coder.template is not None,
        "room": worker.room,
        "tokens_in": metrics.tokens_in,
        "tokens_embedded": metrics.tokens_embedded,
        "tokens_cached": metrics.tokens_cached,
        "tokens_out": metrics.tokens_out,
        **{label: value for label, (_, _, value) in gauges(worker).items()},
        **latencies,
    }
