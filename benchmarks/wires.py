"""Wires: training over 100 Mbit/s and 1 Gbit/s, what codecs cost in loss, and what auto answers.

    python benchmarks/wires.py [--quick]

A GPT of 26M parameters (8 layers, 512 wide, 256 tokens, batch 4 a rank, bf16 autocast), two ranks
of one thread. Two hosts are two network namespaces joined by a cable that `tc` slows down. DDP and
DeepSpeed run a bare loop, LeZero (stage 0: gradients are all-reduced, both ways encoded) its Engine
as it ships; the row without a codec tells what the Engine gives and what the wire. What is counted
begins when the Engine has tried both attention kernels, after 18 steps (peers try none: after 3).

The loss is that of validation text after 300 steps on the loopback with the codec forced, on rows
of 128 tokens. A codec counts for the speedup when its loss is within 1% of DDP's.

The last line is one JSON object: `speedup_…` is the best such codec's tokens/s over DDP's,
`loss_gap_pct` its loss against DDP's, `loopback_auto` tokens/s of codec auto over no codec where
nothing can pay, `codec_bandwidth_share_min` that of `benchmarks/codecs.py`, `bytes_formula_exact`
whether every link counted what the formula says (all-reduces in all these runs; reduce-scatters and
all-gathers in a few steps of stage 3).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from _hosts import missing, run_ranks
from _table import Result, Side, arguments, columns, compare, emit, finish, peer, side

RATES = {"100mbit": "speedup_100mbit", "1gbit": "speedup_1gbit"}
CODECS = ("int8", "int4", "2:4-int4:256", "sign", "sign:32")
QUICK_CODECS = ("int4",)
WITHIN = 0.01
LIMIT_S = 3000
"""Of a side. Its ranks have less, so that it can say what they said."""
RANK = str(Path(__file__).with_name("_wire_ranks.py"))


def job(kind: str, quick: bool, **changes: Any) -> str:
    """What each rank is told."""
    made: dict[str, Any] = {"kind": kind, "quick": quick, "batch": 4, "length": 256, "rate": ""}
    made |= {"steps": 20, "warm": 3, "validate": 0, "wire": {}}
    made["zero"] = {"stage": 0, "compute": "bf16"}
    if quick:
        made |= {"length": 64, "steps": 5, "warm": 2}
    return json.dumps(made | changes)


def coded(name: str) -> dict[str, str]:
    return {} if name == "none" else {"codec": name, "feedback": "both"}


def speed_sides(quick: bool, rate: str) -> list[Side]:
    """Every way to train over one network."""
    why, settled = missing(), {} if quick else {"warm": 18}
    sides = [side(__file__, "DDP", job("ddp", quick, rate=rate), missing=why)]
    for name in QUICK_CODECS if quick else CODECS:
        told = job("lezero", quick, rate=rate, wire=coded(name), **settled)
        sides.append(side(__file__, name, told, missing=why))
    if not quick:
        told = job("lezero", quick, rate=rate, **settled)
        sides.append(side(__file__, "no codec", told, missing=why))
        told = job("lezero", quick, rate=rate, wire={"codec": "auto"}, **settled)
        sides.append(side(__file__, "auto", told, missing=why))
        other = peer(__file__, "DeepSpeed ZeRO-1", "deepspeed", job("deepspeed", quick, rate=rate))
        sides.append(other)
    return sides


def loss_sides(quick: bool) -> list[Side]:
    told = {"steps": 20, "validate": 4} if quick else {"length": 128, "steps": 298, "validate": 60}
    told["warm"] = 2
    sides = [side(__file__, "DDP", job("ddp", quick, **told))]
    for name in QUICK_CODECS if quick else CODECS:
        sides.append(side(__file__, name, job("lezero", quick, wire=coded(name), **told)))
    return sides


def loopback_sides(quick: bool) -> list[Side]:
    """Long enough that auto has measured and decided before what counts."""
    return [
        side(__file__, name, job("lezero", quick, wire=wire, warm=6))
        for name, wire in (("no codec", {}), ("auto", {"codec": "auto"}))
    ]


def counted_sides(quick: bool) -> list[Side]:
    """Where gradients are reduce-scattered and parameters gathered; only the bytes count."""
    wire = {"codec": "int4", "feedback": "worker", "gather": "int8"}
    zero = {"stage": 3, "compute": "bf16"}
    return [side(__file__, "stage 3", job("lezero", quick, wire=wire, zero=zero, steps=3))]


def gaps(losses: Result) -> dict[str, float]:
    """Loss against DDP's, as a fraction, by codec."""
    if "DDP" in losses.failed:
        return {}
    base = losses.median("DDP", "loss")
    names = [name for name in losses.figures if name not in ("DDP", *losses.failed)]
    return {name: losses.median(name, "loss") / base - 1 for name in names}


def best(speeds: Result, gap: dict[str, float]) -> str | None:
    """The fastest codec whose loss is near enough."""
    able = [n for n in gap if gap[n] <= WITHIN and n in speeds.figures and n not in speeds.failed]
    return max(able, key=lambda name: speeds.median(name, "tokens_s"), default=None)


def train(options: argparse.Namespace) -> None:
    """One side: both ranks."""
    told = json.loads(options.job)
    first, _ = run_ranks([sys.executable, RANK, options.job], told["rate"], LIMIT_S - 60)
    emit(**first)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", nargs="?", help=argparse.SUPPRESS)
    options = arguments(__doc__, parser)
    if options.side:
        train(options)
        return
    quick, rounds = options.quick, options.rounds or 1
    losses = compare(loss_sides(quick), rounds=1, threads=1, timeout_s=LIMIT_S)
    gap = gaps(losses)
    print("loss after 300 steps" if not quick else "loss of a small model after 22 steps")
    print(losses.table(["loss", "tokens_s"], base="DDP"), end="\n\n", flush=True)
    figures: dict[str, Any] = dict.fromkeys(RATES.values())
    chosen, results = None, [losses]
    for rate, key in list(RATES.items())[: 1 if quick else None]:
        speeds = compare(speed_sides(quick, rate), rounds=rounds, threads=1, timeout_s=LIMIT_S)
        results.append(speeds)
        found = best(speeds, gap) if "DDP" not in speeds.failed else None
        figures[key] = speeds.ratio("tokens_s", found, "DDP") if found else None
        chosen = chosen or found
        print(f"{rate} between two hosts; the best within {WITHIN:.0%} of DDP's loss: {found}")
        print(speeds.table(["tokens_s", "step_s", "cpu_s", "waited_s", "sent_mb"], base="DDP"))
        for name, rows in speeds.figures.items():
            if rows and rows[-1].get("said"):
                print(f"  {name}: {rows[-1]['said']}")
        print(flush=True)
    home = compare(loopback_sides(quick), rounds=1 if quick else 5, threads=1, timeout_s=LIMIT_S)
    results.append(home)
    results.append(compare(counted_sides(quick), rounds=1, threads=1, timeout_s=LIMIT_S))
    failed = home.failed | results[-1].failed
    if failed:
        raise SystemExit("; ".join(f"{name}: {why}" for name, why in failed.items()))
    figures["loopback_auto"] = home.ratio("tokens_s", "auto", "no codec")
    figures["loss_gap_pct"] = 100 * gap[chosen] if chosen else None
    kernels = Side("codecs", (sys.executable, str(Path(RANK).with_name("codecs.py")), "--quick"))
    share = compare([kernels], rounds=1, threads=options.threads)
    figures["codec_bandwidth_share_min"] = None
    if not share.failed:
        figures["codec_bandwidth_share_min"] = share.median("codecs", "codec_bandwidth_share_min")
    counted = [row["exact"] for one in results for rows in one.figures.values() for row in rows
               if "exact" in row]  # fmt: skip
    figures["bytes_formula_exact"] = bool(counted) and all(counted)
    rows = [["loopback", "tokens/s"]]
    rows += [[name, f"{home.median(name, 'tokens_s'):,.0f}"] for name in home.figures]
    finish("one host, codec auto against none\n" + columns(rows), figures)


if __name__ == "__main__":
    main()
