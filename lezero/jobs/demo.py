"""The demo: LeZero's main job from nothing to a report, with a crash on the way.

Doctor's summary → forecast → training on every core or GPU, its state split by ZeRO, over wires
whose codec is chosen → a real SIGKILL half-way, from which the run resumes by itself → generated
text → the same model in 8 and in 4 bits → what was chosen and why → what was forecast and what was
measured → the 4-bit model behind an HTTP server, asked once and ended cleanly.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import textwrap
import threading
import time
from importlib import resources
from pathlib import Path

import psutil
import torch
import yaml

from lezero.compress.quantize import (
    Int4Weight,
    Int8WeightActivation,
    Scheme,
    quantization_report,
    quantize_,
    save_quantized,
)
from lezero.core import device
from lezero.core.decisions import Decisions
from lezero.core.errors import LeZeroError
from lezero.core.facts import usable_cores
from lezero.core.paths import expand_home
from lezero.data import Data, EvalLoader, prepare
from lezero.elastic import LaunchConfig, launch
from lezero.hub.opened import open_model
from lezero.jobs.demo_serve import SAMPLING, refuse_without_server, serve_and_ask
from lezero.jobs.doctor import summary_lines
from lezero.jobs.perplexity import perplexity
from lezero.plan import forecast
from lezero.plan.table import render
from lezero.profiler.hardware import hardware
from lezero.report import units
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from lezero.train import RunConfig
from lezero.train.metrics import Metrics, read_metrics
from lezero.train.recipe import plan_inputs

_POLL_S = 0.1
_PROMPT = "The function returns"
_SMALL = "int4"
_CALIBRATION, _HELD = 64, 128


def demo(folder: str | None = None) -> int:
    """Runs the whole demo in `folder` (a new `runs/demo-N` if not given); returns its status."""
    began = time.perf_counter()
    refuse_without_server()
    run = Path(expand_home(folder)) if folder else _free_folder()
    ranks = _ranks()
    _title("1  This machine")
    print("\n".join(summary_lines()))
    config = _config(run)
    _title("2  Forecast, before anything is allocated")
    data = prepare(config.data)
    build, spec = plan_inputs(config, data.tokenizer.vocab_size, world=ranks)
    print(render(forecast(build, spec, hardware())))
    _title(f"3  Training on {ranks} rank(s), with a SIGKILL half-way")
    status = _train(run, ranks, config.train.steps // 2)
    if status > 128:  # a signal ended it, and it has said so
        return status
    if status:
        raise LeZeroError(f"the training of the demo ended with status {status}")
    _title("4  What the model writes now")
    print(_PROMPT, end="")
    for piece in LLM(str(run)).stream(_PROMPT, SamplingParams.parse(SAMPLING)):
        print(piece.text, end="", flush=True)
    print()
    _title("5  The same model in 8 and in 4 bits")
    print("\n".join(_smaller(run, data)))
    _title("6  What was chosen, and why")
    print("\n".join(_choices(run)))
    _title("7  Forecast against measured")
    print("\n".join(_comparison(run)))
    _title("8  The 4-bit model, served and asked over HTTP")
    for line in serve_and_ask(run / _SMALL, _PROMPT):
        print(line, flush=True)
    print(f"\nreport      {run / 'report.html'}")
    print(f"why         {_lz()} why {run}")
    print(f"more text   {_lz()} generate {run} --prompt 'A class is'")
    print(f"in 4 bits   {_lz()} generate {run / _SMALL} --prompt 'A class is'")
    print(f"served      {_lz()} serve {run / _SMALL}")
    print(f"done in {time.perf_counter() - began:.0f} s")
    return 0


def _lz() -> str:
    """What a user types to call this very LeZero from here."""
    beside = Path(sys.executable).with_name("lz")
    if shutil.which("lz") or not beside.exists():
        return "lz"
    here = Path.cwd()
    return str(beside.relative_to(here)) if beside.is_relative_to(here) else str(beside)


def _free_folder() -> Path:
    for number in range(1, 10_000):
        path = Path("runs") / (f"demo-{number}" if number > 1 else "demo")
        if not path.exists():
            return path
    raise LeZeroError("runs/ holds 9,999 demos: delete some")


def _ranks() -> int:
    """A rank for each GPU, else two where there are two cores."""
    kind = device.accelerator()
    if kind is not None:
        return device.count()
    return min(2, usable_cores())


def _config(run: Path) -> RunConfig:
    """The demo's config, written to the run's folder so that every rank reads the same."""
    text = resources.files("lezero.jobs").joinpath("demo.yaml").read_text(encoding="utf-8")
    config = RunConfig.parse({**yaml.safe_load(text), "run": str(run)}, "demo.yaml")
    run.mkdir(parents=True, exist_ok=True)
    written = yaml.safe_dump(config.to_dict(), sort_keys=False)
    (run / "demo.yaml").write_text(written, encoding="utf-8")
    return config


def _train(run: Path, ranks: int, half: int) -> int:
    """Trains under the launcher while a second thread waits to kill one rank at step `half`."""
    stop = threading.Event()
    killer = threading.Thread(target=_kill_at, args=(run, half, ranks - 1, stop), name="killer")
    killer.start()
    try:
        command = ["-m", "lezero", "train", str(run / "demo.yaml")]
        return launch(LaunchConfig(ranks=ranks, max_restarts=2), command)
    finally:
        stop.set()
        killer.join()


def _kill_at(run: Path, half: int, rank: int, stop: threading.Event) -> None:
    """Sends SIGKILL to one rank once the run has passed step `half`."""
    while not stop.wait(_POLL_S):
        path = run / "metrics.jsonl"
        if not path.exists() or not read_metrics(path).steps:
            continue
        if read_metrics(path).steps[-1] < half:
            continue
        found = _process_of(rank)
        if found is not None:
            print(f"\n>>> kill -9 {found.pid}   (rank {rank}, after step {half})\n", flush=True)
            os.kill(found.pid, signal.SIGKILL)
            return


def _process_of(rank: int) -> psutil.Process | None:
    """The process below this one that is `rank` of the job."""
    for process in psutil.Process().children(recursive=True):
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("RANK") == str(rank) and "LOCAL_RANK" in environment:
            return process
    return None


def _smaller(run: Path, data: Data) -> list[str]:
    """Before and after quantization: size, perplexity of held-out text, time of a batch."""
    assert data.validation is not None
    batches = list(EvalLoader(data.train, 8, limit=_CALIBRATION // 8))
    held = list(EvalLoader(data.validation, 8, limit=_HELD // 8))
    schemes: dict[str, Scheme] = {
        "int8, activations too": Int8WeightActivation(),
        "int4 g64 by GPTQ": Int4Weight(group=64, method="gptq"),
    }
    lines = [f"{'':<24}{'weights':>10}{'perplexity':>12}{'one batch':>12}"]
    for name, scheme in schemes.items():
        model, tokenizer = open_model(str(run), torch.float32)
        quantize_(
            model,
            scheme,
            data=[batch["tokens"] for batch in batches],
            metric=lambda made: perplexity(made, held),
            objective="size",
        )
        made = quantization_report(model)
        rows = {name: (made.bytes_after, made.quality_after, made.seconds_after)}
        if len(lines) == 1:
            before = (made.bytes_before, made.quality_before, made.seconds_before)
            rows = {"as trained, fp32": before, **rows}
        for row, (size, quality, seconds) in rows.items():
            cells = (units.size(size), units.number(quality), units.span(seconds))
            lines.append(f"{row:<24}" + f"{cells[0]:>10}{cells[1]:>12}{cells[2]:>12}")
    save_quantized(model, run / _SMALL, tokenizer_folder=tokenizer)
    return [*lines, f"the last one is in {run / _SMALL}"]


def _choices(run: Path) -> list[str]:
    """The run's own decisions, a paragraph each."""
    record = json.loads((run / "decisions.json").read_text(encoding="utf-8"))
    lines = []
    for made in Decisions.from_json(record).replay.values():
        text = f"{made.topic}: {made.chosen} ({made.reason})"
        lines += textwrap.wrap(text, 78, subsequent_indent="    ")
    return lines


def _comparison(run: Path) -> list[str]:
    made = json.loads((run / "forecast.json").read_text(encoding="utf-8"))
    metrics = read_metrics(run / "metrics.jsonl")
    seconds = statistics.median(metrics.known("seconds")[1])
    memory = max(metrics.known("memory_bytes")[1])
    mib, stated = 2**20, made["stated_error"]
    lines = [
        f"memory      forecast {made['memory_bytes'] / mib:.0f} MiB a rank, "
        f"measured {memory / mib:.0f} MiB "
        f"({_off(memory / made['memory_bytes'] - 1, stated['memory'])})",
        f"step        forecast {made['step_seconds']:.2f} s, "
        f"measured {seconds:.2f} s ({_off(seconds / made['step_seconds'] - 1, stated['time'])})",
    ]
    busy = os.getloadavg()[0]
    if seconds > made["step_seconds"] * (1 + stated["time"]) and busy > usable_cores() + 1:
        lines.append(f"            other programs use this machine now: its load is {busy:.0f}")
    return [*lines, *_recovery(metrics)]


def _off(error: float, stated: float) -> str:
    """How far a forecast was off, and whether that was to be expected."""
    place = "within" if abs(error) <= stated else "outside"
    return f"{error:+.0%}, {place} the stated ±{stated:.0%}"


def _recovery(metrics: Metrics) -> list[str]:
    """What the crash cost, from the run's own record."""
    losses = metrics.column("loss")
    lines = [f"loss        {losses[0]:.2f} → {losses[-1]:.2f}"]
    for event in metrics.happened("resume"):
        lines.append(f"crash       killed, resumed by itself from step {event['step']}")
    return lines


def _title(text: str) -> None:
    print(f"\n── {text} " + "─" * max(4, 76 - len(text)), flush=True)
    sys.stdout.flush()
