"""What a machine can do and what a program did: ceilings, memory, FLOPs, spans, comparison."""

from __future__ import annotations

from lezero.core.lazy import lazy

_NAMES = {
    "Ceilings": "lezero.profiler.ceilings",
    "Comparison": "lezero.profiler.compare",
    "Difference": "lezero.profiler.compare",
    "FlopCount": "lezero.profiler.flops",
    "GemmPoint": "lezero.profiler.ceilings",
    "Hardware": "lezero.profiler.hardware",
    "MemorySampler": "lezero.profiler.memory",
    "Spans": "lezero.profiler.spans",
    "compare_states": "lezero.profiler.compare",
    "compare_tensors": "lezero.profiler.compare",
    "count_flops": "lezero.profiler.flops",
    "hardware": "lezero.profiler.hardware",
    "pss": "lezero.profiler.memory",
    "rss": "lezero.profiler.memory",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = lazy(__name__, _NAMES)
