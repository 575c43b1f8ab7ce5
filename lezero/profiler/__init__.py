"""What a machine can do and what a program did: ceilings, memory, FLOPs, spans, comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lezero.core.lazy import lazy

# Not lazy: `hardware` is also the name of its module, which a later import would put in its place.
from lezero.profiler.hardware import Hardware, hardware

if TYPE_CHECKING:
    from lezero.profiler.ceilings import Ceilings as Ceilings
    from lezero.profiler.ceilings import GemmPoint as GemmPoint
    from lezero.profiler.ceilings import ReadPoint as ReadPoint
    from lezero.profiler.compare import Comparison as Comparison
    from lezero.profiler.compare import Difference as Difference
    from lezero.profiler.compare import compare_states as compare_states
    from lezero.profiler.compare import compare_tensors as compare_tensors
    from lezero.profiler.flops import FlopCount as FlopCount
    from lezero.profiler.flops import count_flops as count_flops
    from lezero.profiler.memory import MemorySampler as MemorySampler
    from lezero.profiler.memory import pss as pss
    from lezero.profiler.memory import rss as rss
    from lezero.profiler.spans import Spans as Spans

_NAMES = {
    "Ceilings": "lezero.profiler.ceilings",
    "Comparison": "lezero.profiler.compare",
    "Difference": "lezero.profiler.compare",
    "FlopCount": "lezero.profiler.flops",
    "GemmPoint": "lezero.profiler.ceilings",
    "MemorySampler": "lezero.profiler.memory",
    "ReadPoint": "lezero.profiler.ceilings",
    "Spans": "lezero.profiler.spans",
    "compare_states": "lezero.profiler.compare",
    "compare_tensors": "lezero.profiler.compare",
    "count_flops": "lezero.profiler.flops",
    "pss": "lezero.profiler.memory",
    "rss": "lezero.profiler.memory",
}
__all__ = ["Hardware", "hardware", *_NAMES]
__getattr__, __dir__ = lazy(__name__, _NAMES)
