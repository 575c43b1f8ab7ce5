"""What watching two ranks for hangs costs: a step with the watch and without it.

Two Gloo ranks of one thread train a small GPT through the Engine; the sides are the same run with
LEZERO_WATCH=1 and =0, interleaved. The share that the watch takes is also counted directly, since
it lies below what step times can resolve: the time that `enter` and `leave` took, plus the CPU time
of the watch's thread, over the time of the run.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import threading
import time

from _table import arguments, columns, compare, emit, finish, side

VOCAB, LENGTH, BATCH = 256, 128, 4


def build(quick: bool):
    import lezero as lz
    from lezero.models import Transformer, TransformerConfig

    shape = {"layers": 2, "dim": 128} if quick else {"layers": 8, "dim": 256}
    config = TransformerConfig(vocab=VOCAB, heads=4, context=LENGTH, **shape)
    model = Transformer(config)
    optimizer = lz.optim.AdamW(model, lr=3e-4)
    return lz.Engine(model, optimizer, loss=lz.next_token_loss, precision="fp32", compile="off")


def train(steps: int, quick: bool) -> None:
    """One rank: rank 0 prints its figures."""
    import torch

    from lezero.comm.watch import current
    from lezero.core import groups

    groups.join()
    torch.manual_seed(groups.rank())
    engine = build(quick)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    for _ in range(5):
        engine.train_step(batch)
    watch = current()
    entered = watch._entered if watch else 0
    cpu = thread_seconds("lezero-watch")
    began = time.perf_counter()
    times = [engine.train_step(batch).seconds for _ in range(steps)]
    wall = time.perf_counter() - began
    figures = {"step_ms": statistics.median(times) * 1e3, "said": 0}
    if watch is not None:
        thread_s = thread_seconds("lezero-watch") - cpu
        calls = watch._entered - entered
        each = call_seconds(watch)
        figures |= {
            "call_us": each * 1e6,
            "calls_a_step": calls / steps,
            "share": (each * calls + thread_s) / wall,
            "said": int(watch._told is not None),
        }
    groups.barrier()
    groups.leave()
    if os.environ["RANK"] == "0":
        emit(**figures)


def call_seconds(watch) -> float:
    """Seconds that one `enter` and `leave` take in a loop whose order is known."""
    import torch

    shape, names = torch.Size([1024, 512]), [f"layers.{i}.weight" for i in range(200)]
    rounds = []
    for _ in range(20):
        began = time.perf_counter()
        for name in names:
            watch.enter("all_reduce", shape, torch.float32, name)
            watch.leave()
        rounds.append((time.perf_counter() - began) / len(names))
    return statistics.median(rounds)


def thread_seconds(name: str) -> float:
    """CPU seconds that a thread of this process has used; 0 where there is none."""
    for thread in threading.enumerate():
        if thread.name == name and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def two_ranks(quick: bool) -> None:
    """A side: starts both ranks; rank 0's figures are the last line."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--side", "rank", *(["--quick"] if quick else [])]
    started = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        started.append(subprocess.Popen(command, env=env))
    status = max(process.wait() for process in started)
    if status:
        sys.exit(status)


def main() -> None:
    options = arguments(__doc__)
    if options.side == "rank":
        train(60 if options.quick else 300, options.quick)
        return
    if options.side:
        two_ranks(options.quick)
        return
    extra = ["--quick"] if options.quick else []
    sides = [
        side(__file__, name, *extra, env={"LEZERO_WATCH": flag})
        for name, flag in (("watched", "1"), ("not watched", "0"))
    ]
    result = compare(sides, rounds=options.rounds or (1 if options.quick else 5), threads=1)
    watched = {key: result.median("watched", key) for key in ("call_us", "share", "calls_a_step")}
    finish(
        result.table(["step_ms"], base="not watched")
        + "\n\n"
        + columns(
            [
                ["the watch itself", "µs a collective", "collectives a step", "share of the run"],
                ["", *(f"{watched[k]:.3g}" for k in ("call_us", "calls_a_step")),
                 f"{watched['share']:.3%}"],
            ]
        ),
        {
            "watch_share": watched["share"],
            "watch_call_us": watched["call_us"],
            "step_ratio": result.ratio("step_ms", "watched", "not watched"),
            "false_alarms": sum(row["said"] for row in result.figures["watched"]),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
