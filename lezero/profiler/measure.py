"""Measures the ceilings: short calls repeated, memory far larger than the caches.

Each figure has a small share of the time and stands alone: one that fails, or would take too long
on this machine, is left out with its reason and the others go on. `measure_apart` does it in a
process of its own, so that the caller's memory, threads and random numbers stay as they were and a
crash in a kernel is a message, not the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from lezero.core import device as devices
from lezero.core.errors import LeZeroError
from lezero.core.facts import cache_folder
from lezero.core.python import same_imports
from lezero.core.room import free_memory
from lezero.profiler.ceilings import Ceilings, GemmPoint, ReadPoint

GIB, MIB = 2**30, 2**20
_LONGEST_CALL_S = 0.25
_READ_SIZES = tuple(MIB << power for power in range(10))
"""Bytes of the curve of reads, in steps of two, up to half of what is read in all."""


@dataclass(frozen=True)
class Effort:
    """How large and how long. `squares` and `products` are (m, k, n); `memory` bytes to stream;
    `elements` of an elementwise tensor; `attention` (batch, heads, length, head width)."""

    squares: tuple[int, ...] = (256, 512, 1024, 2048)
    products: tuple[tuple[int, int, int], ...] = ((2048, 512, 2048), (2048, 2048, 512))
    memory: int = GIB
    elements: int = 2**24
    disk: int = 256 * MIB
    transfer: int = 256 * MIB
    attention: tuple[int, int, int, int] = (8, 8, 256, 64)
    seconds_each: float = 0.08

    @classmethod
    def tiny(cls) -> Effort:
        """For tests: everything once, in a fraction of a second."""
        return cls((32, 64), ((64, 16, 32),), MIB, 4096, MIB, MIB, (1, 2, 32, 8), 0.002)

    @classmethod
    def accelerator(cls) -> Effort:
        """For a GPU, which needs larger work to show what it can do."""
        return cls(
            squares=(1024, 4096, 8192),
            products=((8192, 1024, 4096), (8192, 4096, 1024)),
            memory=2 * GIB,
            elements=2**26,
            attention=(8, 16, 2048, 64),
        )


@dataclass
class _Bench:
    """What all measurements share: where, how long, and what failed."""

    place: Any
    effort: Effort
    folder: Path
    failed: dict[str, str] = field(default_factory=dict)

    def seconds(self, call: Callable[[], Any], repeats: int = 1) -> float:
        """Seconds of one of `repeats` queued calls: the lower quartile of several such rounds.

        The quartile is what the machine does undisturbed; unlike the best it needs more than one
        witness, unlike the median it holds while another program takes half of the time.
        """
        first = self._round(call, repeats)
        times = [] if first < 8 * self.effort.seconds_each else [first]
        spent = first if times else 0.0
        while len(times) < 200 and spent < self.effort.seconds_each * (4 if len(times) < 5 else 1):
            times.append(self._round(call, repeats))
            spent += times[-1]
        return max(1e-9, sorted(times)[len(times) // 4] / repeats)

    def _round(self, call: Callable[[], Any], repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        devices.synchronize([self.place])
        return time.perf_counter() - began

    @contextlib.contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failed[name] = (str(error).splitlines() or [type(error).__name__])[0][:200]


def measure(
    effort: Effort | None = None, folder: Path | None = None, threads: int | None = None
) -> Ceilings:
    """Measures in this process, on the accelerator if there is one, else on the CPU."""
    import torch

    began = time.perf_counter()
    place = devices.device()
    if effort is None:
        effort = Effort() if place.type == "cpu" else Effort.accelerator()
    bench = _Bench(place, effort, folder or cache_folder())
    kept = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        figures: dict[str, Any] = {"threads": torch.get_num_threads()}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            figures |= _gemm(bench) | _memory(bench) | _overhead(bench)
            figures |= {"elementwise": _elementwise(bench), "attention": _attention(bench)}
            figures |= _disk(bench) | _transfers(bench)
    finally:
        torch.set_num_threads(kept)
    return Ceilings(
        device=str(place),
        torch=torch.__version__,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - began, 2),
        failed=bench.failed,
        **figures,
    )


def measure_apart(
    threads: int | None = None,
    folder: Path | None = None,
    tiny: bool = False,
    timeout_s: float = 180.0,
) -> Ceilings:
    """Measures in a process of its own. Raises `LeZeroError` when that process fails."""
    ask = {"threads": threads, "folder": str(folder or cache_folder()), "tiny": tiny}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(ask)],
            env=same_imports(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LeZeroError(f"measuring the ceilings failed: {error}") from None
    if done.returncode != 0:
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"{done.returncode}"
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LeZeroError(f"measuring the ceilings failed (exit status {ended}): {last}")
    return Ceilings.from_dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """The measuring process: reads what is asked from its argument, prints one line of JSON."""
    ask = json.loads(sys.argv[1])
    found = measure(
        Effort.tiny() if ask["tiny"] else None, Path(ask["folder"]), threads=ask["threads"]
    )
    print(json.dumps(found.to_dict()))


def _gemm(bench: _Bench) -> dict[str, Any]:
    """Products in each dtype, small ones first; those that would take too long are left out."""
    import torch

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": None}
    shapes = [(size, size, size, "nn") for size in bench.effort.squares]
    shapes += [(*shape, lay) for shape in bench.effort.products for lay in ("nn", "nt", "tn")]
    points: list[GemmPoint] = []
    began, used = time.perf_counter(), time.process_time()
    for name, dtype in kinds.items():
        rate = 0.0
        for m, k, n, layout in shapes:
            if (rate and 2 * m * k * n / rate > _LONGEST_CALL_S) or (
                dtype is None and layout != "nn"
            ):
                continue
            with bench.guarded(f"gemm_{name}"):
                seconds = bench.seconds(_product(bench.place, dtype, m, k, n, layout))
                rate = 2 * m * k * n / seconds
                points.append(GemmPoint(name, m, k, n, layout, rate))
    asked = (time.perf_counter() - began) * torch.get_num_threads()
    got = (time.process_time() - used) / asked if bench.place.type == "cpu" else 1.0
    best: dict[str, Any] = {
        f"gemm_{name}": max((p.ops_per_s for p in points if p.dtype == name), default=None)
        for name in kinds
    }
    return {"gemm_curve": tuple(points), "cpu_share": round(min(1.0, got), 3), **best}


def _product(place: Any, dtype: Any, m: int, k: int, n: int, layout: str) -> Callable[[], Any]:
    import torch

    if dtype is None:
        one = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=place)
        two = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=place).t()
        return lambda: torch._int_mm(one, two)
    kinds = {"dtype": dtype, "device": place}
    a = torch.randn(k, m, **kinds).t() if layout == "tn" else torch.randn(m, k, **kinds)
    b = torch.randn(n, k, **kinds).t() if layout == "nt" else torch.randn(k, n, **kinds)
    out = torch.empty(m, n, dtype=dtype, device=place)
    return lambda: torch.mm(a, b, out=out)


def _memory(bench: _Bench) -> dict[str, Any]:
    """Streams over memory much larger than the caches; a quarter of what is free at most."""
    import torch

    found: dict[str, Any] = {}
    place = bench.place
    free = free_memory() if place.type == "cpu" else devices.memory_free()
    size = max(MIB, min(bench.effort.memory, free // 4) // MIB * MIB)
    with bench.guarded("memory_read"):
        part = size // 4
        fresh = bench.seconds(lambda: torch.empty(part, dtype=torch.int8, device=place).fill_(1))
        found["memory_fresh"] = part / fresh
        block = torch.ones(size // 4, dtype=torch.float32, device=place)
        found["memory_read"] = _read(bench, block)
        sizes = [part for part in _READ_SIZES if part < size]
        curve = [ReadPoint(part, _read(bench, block[: part // 4])) for part in sizes]
        found["read_curve"] = (*curve, ReadPoint(size, found["memory_read"]))
        half = block.numel() // 2
        found["memory_copy"] = size / bench.seconds(lambda: block[:half].copy_(block[half:]))
    return found


def _read(bench: _Bench, block: Any) -> float:
    """B/s of the faster of two ways to read it."""
    import torch

    reads = (lambda: torch.dot(block, block), lambda: torch.sum(block))
    return float(block.nbytes / min(bench.seconds(read) for read in reads))


def _overhead(bench: _Bench) -> dict[str, float]:
    import torch

    one, out = torch.zeros(1, device=bench.place), torch.empty(1, device=bench.place)
    return {"op_overhead": bench.seconds(lambda: torch.add(one, one, out=out), repeats=500)}


def _elementwise(bench: _Bench) -> dict[str, float]:
    """B/s of what training does between products; outputs exist beforehand."""
    import torch

    found: dict[str, float] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for op, call, size in _kernels(bench, dtype):
            with bench.guarded(f"{op}_{name}"):
                found[f"{op}_{name}"] = size / bench.seconds(call)
    with bench.guarded("adamw_fp32"):
        found["adamw_fp32"] = _adamw(bench)
    return found


def _kernels(bench: _Bench, dtype: Any) -> list[tuple[str, Callable[[], Any], int]]:
    """(name, call, bytes moved) of each elementwise kernel in one dtype."""
    import torch

    aten = torch.ops.aten
    x = torch.randn(bench.effort.elements, dtype=dtype, device=bench.place)
    y, out, width = x.flip(0), torch.empty_like(x), min(512, x.numel())
    other = torch.empty_like(x, dtype=torch.float32 if dtype != torch.float32 else torch.bfloat16)
    rows, rows_out = x.view(-1, width), out.view(-1, width)
    gain = x.new_ones(width)
    # means are fp32 on an accelerator, whatever the rows are
    _, mean, rstd = aten.native_layer_norm(rows, [width], gain, gain, 1e-5)

    def layer_norm() -> None:
        norm = aten.native_layer_norm.out
        norm(rows, [width], gain, gain, 1e-5, out0=rows_out, out1=mean, out2=rstd)

    return [
        ("copy", lambda: out.copy_(x), 2 * x.nbytes),
        ("cast", lambda: other.copy_(x), x.nbytes + other.nbytes),
        ("add", lambda: torch.add(x, y, out=out), 3 * x.nbytes),
        ("mul", lambda: torch.mul(x, y, out=out), 3 * x.nbytes),
        ("gelu", lambda: aten.gelu.out(x, out=out), 2 * x.nbytes),
        (
            "gelu_backward",
            lambda: aten.gelu_backward.grad_input(y, x, grad_input=out),
            3 * x.nbytes,
        ),
        ("silu", lambda: aten.silu.out(x, out=out), 2 * x.nbytes),
        ("softmax", lambda: aten._softmax.out(rows, -1, False, out=rows_out), 2 * x.nbytes),
        ("layer_norm", layer_norm, 2 * x.nbytes),
    ]


def _adamw(bench: _Bench) -> float:
    """Fused AdamW: reads parameter, gradient and two moments, writes all but the gradient."""
    import torch

    p, g, m, v = ([torch.ones(bench.effort.elements, device=bench.place)] for _ in range(4))
    steps = [torch.ones((), device=bench.place)]
    seconds = bench.seconds(
        lambda: torch._fused_adamw_(
            *(p, g, m, v, [], steps),
            lr=1e-4,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
    )
    return 7 * p[0].nbytes / seconds


def _attention(bench: _Bench) -> dict[str, float]:
    """FLOP/s of causal attention, all pairs counted: forward 4·B·H·T²·D, backward 2.5 times it."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    batch, heads, length, width = bench.effort.attention
    forward_flops = 4 * batch * heads * length * length * width
    found: dict[str, float] = {}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if bench.place.type != "cpu":
        dtypes["fp16"] = torch.float16
    for name, dtype in dtypes.items():
        with bench.guarded(f"attention_{name}"), torch.enable_grad():
            shape = (batch, heads, length, width)
            kinds = {"dtype": dtype, "device": bench.place, "requires_grad": True}
            q, k, v = (torch.randn(shape, **kinds) for _ in "qkv")
            out = attend(q, k, v, is_causal=True)
            push = torch.ones_like(out)
            seconds = bench.seconds(partial(attend, q, k, v, is_causal=True))
            found[f"{name}_forward"] = forward_flops / seconds
            back = partial(torch.autograd.grad, out, (q, k, v), push, retain_graph=True)
            found[f"{name}_backward"] = 2.5 * forward_flops / bench.seconds(back)
    return found


def _disk(bench: _Bench) -> dict[str, float]:
    """Writes and fsyncs once in the cache folder, at most a tenth of what is free there."""
    path = bench.folder / f"disk-{os.getpid()}.tmp"
    with bench.guarded("disk_write"):
        bench.folder.mkdir(parents=True, exist_ok=True)
        state = os.statvfs(bench.folder)
        chunk = os.urandom(min(MIB, bench.effort.disk))
        count = min(bench.effort.disk, state.f_bavail * state.f_frsize // 10) // len(chunk)
        if count < 1:
            raise OSError("no space left to try")
        try:
            began = time.perf_counter()
            written = 0
            with open(path, "wb", buffering=0) as file:
                while written < count and time.perf_counter() - began < 1.0:
                    file.write(chunk)
                    written += 1
                os.fsync(file.fileno())
            return {"disk_write": written * len(chunk) / (time.perf_counter() - began)}
        finally:
            path.unlink(missing_ok=True)
    return {}


def _transfers(bench: _Bench) -> dict[str, float]:
    """Copies between pinned host memory and the accelerator."""
    import torch

    if bench.place.type == "cpu":
        return {}
    found: dict[str, float] = {}
    with bench.guarded("h2d"):
        size = bench.effort.transfer
        try:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            host = torch.empty(size, dtype=torch.uint8)
        there = torch.empty(size, dtype=torch.uint8, device=bench.place)
        found["h2d"] = size / bench.seconds(lambda: there.copy_(host, non_blocking=True))
        found["d2h"] = size / bench.seconds(lambda: host.copy_(there, non_blocking=True))
    return found
