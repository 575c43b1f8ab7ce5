"""`hardware()`: what this machine is and what it reached when it was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lezero.core import facts as core_facts
from lezero.core.errors import LeZeroError
from lezero.core.facts import Facts
from lezero.core.log import logger
from lezero.profiler.ceilings import Ceilings, cache_file, cached, load


@dataclass(frozen=True)
class Hardware:
    """`facts` are read anew at each call; `ceilings` is None where nothing was measured."""

    facts: Facts
    ceilings: Ceilings | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        ceilings = self.ceilings.to_dict() if self.ceilings is not None else None
        return {"facts": self.facts.to_dict(), "ceilings": ceilings}


def hardware(refresh: bool = False, measure: bool = True) -> Hardware:
    """Facts and measured ceilings of this machine, for the threads that torch uses now.

    The ceilings come from the cache folder. Where they are not there, or with `refresh`, they are
    measured, about 10 s in a process of its own; with `measure=False` they stay None. A measurement
    that fails is told as a warning and gives None: nothing that asks for hardware ends by it.
    """
    import torch

    from lezero.core.device import device
    from lezero.profiler.measure import measure_apart

    facts = core_facts.facts()
    threads = torch.get_num_threads()
    path = cache_file(facts.machine_id, device().type, threads)
    if not measure and not refresh:
        return Hardware(facts, load(path))
    try:
        return Hardware(facts, cached(path, lambda: measure_apart(threads), refresh))
    except LeZeroError as error:
        logger("profiler").warning("%s", error)
        return Hardware(facts, None)
