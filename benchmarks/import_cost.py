"""Seconds that `import lezero` costs beyond `import torch`, beside those of other libraries.

Each side first imports torch, then times its own import, in a fresh process. `lezero, all names`
also touches every public name, which loads what lies behind them. The modules that each import
brings in are counted as well.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module

from _table import arguments, compare, emit, finish, peer, side

PEERS = {
    "lightning fabric": "lightning.fabric",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
}


def measure(name: str) -> None:
    """One side: torch first, then the library."""
    import torch  # noqa: F401

    known = len(sys.modules)
    began = time.perf_counter()
    module = import_module(PEERS.get(name, "lezero"))
    if name == "lezero, all names":
        for public in module.__all__:
            getattr(module, public)
    seconds = time.perf_counter() - began
    emit(seconds=seconds, modules=len(sys.modules) - known)


def main() -> None:
    options = arguments(__doc__)
    if options.side:
        measure(options.side)
        return
    sides = [side(__file__, "lezero"), side(__file__, "lezero, all names")]
    sides += [peer(__file__, name, module.split(".")[0]) for name, module in PEERS.items()]
    rounds = options.rounds or (1 if options.quick else 5)
    result = compare(sides, rounds=rounds, threads=options.threads)
    if "lezero" in result.failed:
        raise SystemExit(result.failed["lezero"])
    seconds = result.median("lezero", "seconds")
    figures = {"import_seconds_beyond_torch": seconds}
    if "lezero, all names" not in result.failed:
        figures["all_names_seconds"] = result.median("lezero, all names", "seconds")
    for name in PEERS:
        if name not in result.failed:
            figures[f"{name.replace(' ', '_')}_seconds"] = result.median(name, "seconds")
    print("Seconds beyond `import torch`, medians")
    finish(result.table(["seconds", "modules"]), figures)


if __name__ == "__main__":
    main()
