"""Measured ceilings of this machine: how fast it multiplies, reads, copies and writes at best.

`Ceilings` is what `lezero.profiler.measure` found, kept as JSON in the cache folder, one file a
machine, device and thread count. A file that is damaged, of another format or of another key is
measured again and replaced; a folder that cannot be written costs a warning, nothing more.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError
from lezero.core.facts import cache_folder
from lezero.core.log import logger

FORMAT = 2
_MOST_RATE = 1e30
_WAIT_S = 180.0
# Below this share of the processor time asked for, other programs ran beside the measurement.
_UNDISTURBED = 0.8
_IDLE_LOAD = 0.7


@dataclass(frozen=True)
class GemmPoint:
    """One measured product (m,k)·(k,n). `layout` says how its operands lie: "nn" both row-major,
    "nt" the second transposed (a linear layer's forward), "tn" the first (its weight gradient)."""

    dtype: str
    m: int
    k: int
    n: int
    layout: str
    ops_per_s: float

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True)
class ReadPoint:
    """Reading the same `size` bytes again and again, of which caches keep what they can."""

    size: int
    bytes_per_s: float


@dataclass(frozen=True)
class Ceilings:
    """What the machine reached. None or a missing key: not measured; `failed` says why.

    gemm_*: FLOP/s (int8: OP/s), the best of `gemm_curve`. memory_read and memory_copy: B/s over at
    least 1 GiB where memory allows (a copy counts bytes read and written); read_curve: of fewer
    bytes, which caches hold in part, the smallest first. memory_fresh: B/s of a
    first write to new memory, page faults included. disk_write: B/s with fsync in the cache folder.
    h2d, d2h: B/s between pinned host memory and the accelerator. op_overhead: seconds that a tiny
    operation costs. attention: "bf16_backward" and the like → FLOP/s of causal attention, counted
    as if every pair were computed (as `lezero.profiler.flops` counts). elementwise: "gelu_bf16" and
    the like → B/s, each tensor read or written once, outputs already allocated. cpu_share: part of
    the processor time asked for that the products got; well below 1, other programs were running
    and the machine can do better than this.
    """

    device: str
    threads: int
    torch: str
    measured_at: str = ""
    seconds: float = 0.0
    cpu_share: float = 1.0
    gemm_fp32: float | None = None
    gemm_bf16: float | None = None
    gemm_fp16: float | None = None
    gemm_int8: float | None = None
    memory_read: float | None = None
    memory_copy: float | None = None
    memory_fresh: float | None = None
    disk_write: float | None = None
    h2d: float | None = None
    d2h: float | None = None
    op_overhead: float | None = None
    gemm_curve: tuple[GemmPoint, ...] = ()
    read_curve: tuple[ReadPoint, ...] = ()
    attention: Mapping[str, float] = field(default_factory=dict)
    elementwise: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def disturbed(self) -> bool:
        """True when other programs held the figures down."""
        return self.cpu_share < _UNDISTURBED

    def gemm(self, dtype: str) -> float | None:
        """The best FLOP/s of a product in "fp32", "bf16", "fp16" or "int8"."""
        return {
            "fp32": self.gemm_fp32,
            "bf16": self.gemm_bf16,
            "fp16": self.gemm_fp16,
            "int8": self.gemm_int8,
        }[dtype]

    def gemm_at(self, dtype: str, m: int, k: int, n: int, layout: str = "nn") -> float | None:
        """FLOP/s expected of one product: that of the measured point nearest in shape.

        Distance is in the logarithms of m, k and n; a point of the same layout is preferred.
        """
        points = [point for point in self.gemm_curve if point.dtype == dtype]

        def distance(point: GemmPoint) -> float:
            pairs = ((point.m, m), (point.k, k), (point.n, n))
            apart = sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in pairs)
            return apart + (0.0 if point.layout == layout else 0.5)

        return min(points, key=distance).ops_per_s if points else self.gemm(dtype)

    def read_at_most(self, size: int) -> float | None:
        """B/s at which so many bytes are read again and again, at most: that of as many or the next
        fewer that were measured, or what more of them reached."""
        if not self.read_curve:
            return self.memory_read
        fewer = sum(point.size <= size for point in self.read_curve)
        return max(point.bytes_per_s for point in self.read_curve[max(0, fewer - 1) :])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        data = asdict(self)
        data["gemm_curve"] = [asdict(point) for point in self.gemm_curve]
        data["read_curve"] = [asdict(point) for point in self.read_curve]
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Ceilings:
        """Rebuilds what `to_dict` wrote. Raises `FileError` for anything else."""
        known = {item.name: item for item in fields(cls)}
        if not isinstance(data, dict) or not data.keys() <= known.keys():
            raise FileError("measured ceilings: not a record of this version")
        try:
            points = tuple(GemmPoint(**point) for point in data.get("gemm_curve", ()))
            reads = tuple(ReadPoint(**point) for point in data.get("read_curve", ()))
            made = cls(**{**data, "gemm_curve": points, "read_curve": reads})
        except (TypeError, AttributeError) as error:
            raise FileError(f"measured ceilings: {error}") from None
        if not isinstance(made.attention, dict) or not isinstance(made.elementwise, dict):
            raise FileError("measured ceilings: attention and elementwise must be mappings")
        rates: list[Any] = [*made.attention.values(), *made.elementwise.values()]
        rates += [point.ops_per_s for point in points]
        rates += [rate for point in reads for rate in (point.size, point.bytes_per_s)]
        rates += [value for key in known if (value := _rate(made, key)) is not None]
        if any(type(rate) not in (float, int) or not 0 < rate < _MOST_RATE for rate in rates):
            raise FileError("measured ceilings: a rate is not a number above 0")
        sizes = [point.size for point in reads]
        if sizes != sorted(set(sizes)):
            raise FileError("measured ceilings: the sizes of reads do not rise")
        return made


def _rate(made: Ceilings, key: str) -> Any:
    prefixes = ("gemm_fp", "gemm_bf", "gemm_int", "memory_", "disk_", "op_")
    return getattr(made, key) if key.startswith(prefixes) or key in ("h2d", "d2h") else None


def cache_file(machine_id: str, device: str, threads: int, folder: Path | None = None) -> Path:
    """Where the ceilings of one machine, device and thread count are kept."""
    kind = device.partition(":")[0]
    return (folder or cache_folder()) / f"ceilings-{machine_id}-{kind}-{threads}t.json"


def load(path: Path) -> Ceilings | None:
    """The ceilings stored in `path`; None when there are none or the file cannot be trusted."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            return None
        return Ceilings.from_dict(data["ceilings"])
    except (OSError, ValueError, KeyError, RecursionError):
        return None


def store(path: Path, ceilings: Ceilings) -> None:
    """Writes aside, fsyncs and renames. Raises `OSError` when the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "ceilings": ceilings.to_dict()}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def cached(path: Path, measure: Callable[[], Ceilings], refresh: bool = False) -> Ceilings:
    """The stored ceilings, measured first where there are none or a fresh look is asked for.

    Those that were measured beside other programs are replaced as soon as the machine is idle.

    Two processes never measure at once, since each would slow the other: the second one waits and
    takes what the first found.
    """
    asked = time.time()
    found = load(path)
    refresh = refresh or (found is not None and found.disturbed and _idle())
    if found is not None and not refresh:
        return found
    with _alone(path):
        with contextlib.suppress(OSError):
            if not refresh or path.stat().st_mtime > asked:
                found = load(path)
                if found is not None:
                    return found
        found = measure()
        try:
            store(path, found)
        except OSError as error:
            logger("profiler").warning(
                "measured ceilings are not kept: %s cannot be written (%s); "
                "set LEZERO_CACHE to a folder that can",
                path.parent,
                error.strerror or error,
            )
        return found


def _idle() -> bool:
    """True when hardly anything ran in the last minute."""
    try:
        return os.getloadavg()[0] < _IDLE_LOAD
    except (OSError, AttributeError):
        return False


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds a lock beside `path`; goes on without it where there can be none, or after a while."""
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path.with_suffix(".lock"), "a")  # noqa: SIM115 (closed below)
    except (ImportError, OSError):
        yield
        return
    with file:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.05)
        yield
