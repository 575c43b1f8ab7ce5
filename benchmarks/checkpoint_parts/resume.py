"""Bitwise resume: a run that was killed and resumed against one that was not.

Both are started by LeZero's launcher and take 20 steps, with a checkpoint every 5. In one of them a
rank is hit by SIGKILL after step 13; the launcher starts all ranks again and they go on by
themselves from step 10. What is compared, bit for bit: every tensor of the last generation
(weights, optimizer state, generators), its step, data cursor and best loss, and the loss, gradient
norm, learning rate and validation loss of all 20 steps.
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lezero.elastic import LaunchConfig, launch
from lezero.files import list_generations, read_generation
from lezero.train.metrics import read_metrics

STEPS, EVERY, KILL_AT = 20, 5, 13
WORKER = Path(__file__).with_name("resume_worker.py")


@dataclass(frozen=True)
class Case:
    """What one pair of runs has in common."""

    ranks: int
    precision: str
    compile: str
    stage: int | None = None
    """Of ZeRO, over a wire of int4 that keeps what encoding lost; None: plain data parallelism."""

    def __str__(self) -> str:
        ranks = "1 rank " if self.ranks == 1 else f"{self.ranks} ranks"
        form = "eager" if self.compile == "off" else f"compiled ({self.compile})"
        zero = "" if self.stage is None else f"  ZeRO {self.stage}, int4"
        return f"{ranks}  {self.precision}  {form}{zero}"


CASES = [Case(*c) for c in itertools.product((1, 2), ("fp32", "bf16"), ("off", "blocks"))]
CASES += [Case(2, "bf16", "off", stage) for stage in range(4)]
QUICK = [Case(1, "fp32", "off"), Case(2, "bf16", "off"), Case(2, "bf16", "off", 3)]


Start = Callable[[Case, Path, int], None]
"""Trains (case, config file, step to be killed at; 0: none) and raises where the run fails."""


def launched(case: Case, path: Path, kill_at: int) -> None:
    """Trains under LeZero's launcher."""
    config = LaunchConfig(
        ranks=case.ranks, threads=1, max_restarts=int(kill_at > 0), oversubscribe=True, quiet=True
    )
    words = [str(WORKER), str(path), str(kill_at)]
    status = launch(config, words, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
    if status:
        raise RuntimeError(f"{case}: the {path.stem} run ended with status {status}")


def differences(
    case: Case, folder: Path, whole: Start = launched, killed: Start = launched
) -> list[str]:
    """Runs a pair and names everything in which the two differ; empty when they are equal.

    `whole` starts the run that is not killed, `killed` the other one, again where it is needed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text("\n\n".join(pydoc_data.topics.topics.values())[:40_000], encoding="utf-8")
    with ThreadPoolExecutor(2) as pool:  # side by side: bits do not depend on how long it takes
        pairs = ((whole, 0), (killed, KILL_AT))
        runs = list(pool.map(lambda pair: _train(case, folder, text, *pair), pairs))
    return _compare(*runs)


def _train(case: Case, folder: Path, text: Path, start: Start, kill_at: int) -> Path:
    run = folder / ("killed" if kill_at else "whole")
    config: dict[str, Any] = {
        "run": str(run),
        "model": {"layers": 2, "dim": 32, "heads": 2},
        "data": {"train": [str(text)], "tokenizer": "bytes", "sequence": 32},
        "train": {
            "steps": STEPS,
            "batch": 8,
            "accumulate": 2,
            "lr": 1e-3,
            "precision": case.precision,
            "compile": case.compile,
        },
        "validation": {"every": 7, "batches": 2},
        "checkpoint": {"every": EVERY},
        "report": {"samples": []},
    }
    if case.stage is not None:
        config["zero"] = {"stage": case.stage}
        config["wire"] = {"codec": "int4", "feedback": "worker", "topology": "flat"}
    path = folder / f"{run.name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    start(case, path, kill_at)
    return run


def _compare(whole: Path, killed: Path) -> list[str]:
    a = read_generation(list_generations(whole / "checkpoints")[-1])
    b = read_generation(list_generations(killed / "checkpoints")[-1])
    found = [] if a.step == b.step == STEPS else [f"last steps: {a.step} and {b.step}"]
    resumed = [event["step"] for event in read_metrics(killed / "metrics.jsonl").happened("resume")]
    if resumed != [KILL_AT - KILL_AT % EVERY]:
        found.append(f"the killed run resumed at {resumed}")
    found += [f"tensor {name}" for name in sorted(a.tensors.keys() ^ b.tensors.keys())]
    both = sorted(a.tensors.keys() & b.tensors.keys())
    found += [f"tensor {name}" for name in both if not _same_bits(a.tensors[name], b.tensors[name])]
    found += [
        f"document {name}"
        for name in ("state", "cursor", "progress", "optimizer", "random")
        if a.documents[name] != b.documents[name]
    ]
    return found + _compare_metrics(whole, killed)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _compare_metrics(whole: Path, killed: Path) -> list[str]:
    a, b = (read_metrics(run / "metrics.jsonl") for run in (whole, killed))
    if list(a.steps) != list(b.steps) or list(a.steps) != list(range(1, STEPS + 1)):
        return [f"steps in metrics.jsonl: {list(a.steps)} and {list(b.steps)}"]
    return [
        f"{name} of step {step}"
        for name in ("loss", "grad_norm", "lr", "tokens", "validation_loss")
        for step, x, y in zip(a.steps, a.column(name), b.column(name), strict=True)
        if x != y and not (x != x and y != y)
    ]


def resume(quick: bool) -> tuple[bool, int]:
    """(every case bitwise equal, cases); prints a line a case."""
    cases = QUICK[:1] if quick else CASES  # the tests run all of QUICK
    print("\nBitwise resume: 20 steps against 13 + SIGKILL + resume at 10 + 10")
    equal = True
    for case in cases:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="lezero-resume-") as folder:
            try:
                found = differences(case, Path(folder))
            except RuntimeError as error:
                found = [str(error)]
        equal = equal and not found
        said = "equal" if not found else f"DIFFERENT: {', '.join(found[:5])}"
        print(f"{case!s:36}{said}  ({time.monotonic() - began:.0f} s)", flush=True)
    return equal, len(cases)
