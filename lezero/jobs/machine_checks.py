"""The doctor's checks of the machine: cores, memory, devices, disks, measured ceilings."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from lezero.core.checks import Check, Context, Finding, checks
from lezero.jobs.software_checks import OTHER_CACHE, python
from lezero.report import units

GIB, MIB = 2**30, 2**20
LEAST_MEMORY, LEAST_FREE_MEMORY = 4 * GIB, GIB
LEAST_DISK = 2 * GIB
LEAST_SHARED = 512 * MIB
SLOW_DISK = 50e6


@checks.register("cores")
class CoresCheck(Check):
    """How many threads may run, and whether torch would start more than that."""

    def run(self, context: Context) -> list[Finding]:
        cpu = context.facts.cpu
        found = []
        threads = int(context.torch.get("threads") or 0)
        told = context.environment.get("OMP_NUM_THREADS", "")
        if threads > cpu.usable:
            why = f"OMP_NUM_THREADS={told}" if told else "torch does not see the limit of the group"
            found.append(
                Finding(
                    severity="warning",
                    title=f"torch starts {threads} threads on {cpu.usable} usable cores",
                    cause=f"{why}; threads that wait for each other's core make every step slower.",
                    fix=f"export OMP_NUM_THREADS={cpu.usable}",
                )
            )
        elif threads and told and threads < cpu.usable:
            found.append(
                Finding(
                    severity="note",
                    title=f"torch uses {threads} of {cpu.usable} usable cores",
                    cause=f"OMP_NUM_THREADS={told}.",
                    fix="unset OMP_NUM_THREADS",
                )
            )
        if cpu.usable < cpu.logical:
            limit = "" if cpu.quota is None else f", control group: {cpu.quota:g}"
            found.append(
                Finding(
                    severity="note",
                    title=f"{cpu.usable} of the machine's {cpu.logical} cores may be used",
                    cause=f"Affinity: {cpu.affinity}{limit}. LeZero counts the usable ones.",
                )
            )
        return found or [Finding(severity="ok", title=f"{cpu.usable} cores")]


@checks.register("precision")
class PrecisionCheck(Check):
    """Whether the processor multiplies bfloat16 natively, where it has to do the work."""

    def run(self, context: Context) -> list[Finding]:
        cpu = context.facts.cpu
        if context.facts.accelerators:
            return []
        if cpu.native_bf16:
            names = [name for name in cpu.instruction_sets if "bf16" in name]
            return [Finding(severity="ok", title=f"native bf16 ({', '.join(names)})")]
        return [
            Finding(
                severity="note",
                title="bf16 is not native on this processor",
                cause="It has neither AMX nor AVX512-BF16 (nor Arm's bf16), so precision 'auto' "
                "trains in fp32.",
            )
        ]


@checks.register("memory")
class MemoryCheck(Check):
    """How much memory a run may use."""

    def run(self, context: Context) -> list[Finding]:
        memory = context.facts.memory
        if not memory.limit:
            return [Finding(severity="note", title="the memory of this machine is unknown")]
        found = []
        if memory.limit < LEAST_MEMORY:
            group = memory.limit < memory.total
            where = f"{memory.limited_by} allows no more" if group else "the machine has no more"
            found.append(
                Finding(
                    severity="warning",
                    title=f"only {units.size(memory.limit)} of memory may be used",
                    cause=f"{where.capitalize()}; importing torch and its parts takes 0.5 GiB.",
                    fix="docker update --memory=8g --memory-swap=8g CONTAINER"
                    if group
                    else "lz plan CONFIG   # tells what fits",
                )
            )
        elif memory.limit < memory.total:
            found.append(
                Finding(
                    severity="note",
                    title=f"memory is limited to {units.size(memory.limit)} "
                    f"of {units.size(memory.total)}",
                    cause=f"By {memory.limited_by}; forecasts use the limit.",
                )
            )
        if memory.available < LEAST_FREE_MEMORY:
            found.append(
                Finding(
                    severity="warning",
                    title=f"only {units.size(memory.available)} of memory is free",
                    cause="Other processes hold the rest; a run may be killed by the system.",
                    fix="ps aux --sort=-rss | head",
                )
            )
        return found or [Finding(severity="ok", title=f"{units.size(memory.limit)} of memory")]


@checks.register("huge-pages")
class HugePagesCheck(Check):
    """Large blocks are filled faster where the kernel may use huge pages for them."""

    def run(self, context: Context) -> list[Finding]:
        setting = context.facts.memory.huge_pages
        if setting == "never":
            return [
                Finding(
                    severity="note",
                    title="transparent huge pages are switched off",
                    cause="Filling new memory then costs a page fault every 4 KiB.",
                    fix="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
                )
            ]
        return [Finding(severity="ok", title=f"huge pages: {setting}")] if setting else []


@checks.register("shared-memory")
class SharedMemoryCheck(Check):
    """Data workers and NCCL exchange data through /dev/shm; containers often give it 64 MiB."""

    def run(self, context: Context) -> list[Finding]:
        free = context.facts.memory.shared
        if free >= LEAST_SHARED:
            return [Finding(severity="ok", title=f"{units.size(free)} of shared memory")]
        if not (context.root / "dev/shm").is_dir():
            return []
        return [
            Finding(
                severity="warning",
                title=f"only {units.size(free)} free in /dev/shm",
                cause="Data workers and NCCL pass data through it and end with a bus error.",
                fix="docker run --shm-size=2g …   # or: sudo mount -o remount,size=2g /dev/shm",
            )
        ]


@checks.register("cache")
class CacheCheck(Check):
    """The cache folder can be written."""

    def run(self, context: Context) -> list[Finding]:
        trial = context.cache / f"doctor-{uuid.uuid4().hex}.tmp"
        try:
            context.cache.mkdir(parents=True, exist_ok=True)
            trial.write_bytes(b"x")
        except OSError as error:
            return [
                Finding(
                    severity="warning",
                    title="the cache folder cannot be written",
                    cause=f"{context.cache}: {error.strerror or error}. Ceilings are measured each "
                    "time they are needed.",
                    fix=OTHER_CACHE,
                )
            ]
        finally:
            with contextlib.suppress(OSError):
                trial.unlink(missing_ok=True)
        return [Finding(severity="ok", title="cache folder")]


@checks.register("disk")
class DiskCheck(Check):
    """Room for checkpoints where the user stands, and how fast they are written."""

    def run(self, context: Context) -> list[Finding]:
        found = []
        for folder in dict.fromkeys((_working_folder(), context.cache)):
            try:
                free = shutil.disk_usage(_existing(folder)).free
            except OSError:
                continue
            if free < LEAST_DISK:
                found.append(
                    Finding(
                        severity="warning",
                        title=f"only {units.size(free)} of disk is free",
                        cause=f"In {folder}. A checkpoint takes 12 bytes a parameter; a full "
                        "disk holds none.",
                        fix=f"df -h {folder}",
                    )
                )
        speed = getattr(context.ceilings, "disk_write", None)
        if speed is not None and speed < SLOW_DISK:
            found.append(
                Finding(
                    severity="note",
                    title=f"the disk writes only {units.rate(speed, 'B/s')}",
                    cause=f"Measured in {context.cache}. A checkpoint of 1 GB takes "
                    f"{units.span(1e9 / speed)}; training goes on meanwhile.",
                )
            )
        return found or [Finding(severity="ok", title="disk space")]


@checks.register("accelerator")
class AcceleratorCheck(Check):
    """The GPU that is here is one that this torch can use."""

    def run(self, context: Context) -> list[Finding]:
        facts, torch = context.facts, context.torch
        if not torch:
            return []
        built = bool(torch.get("cuda") or torch.get("hip"))
        if facts.accelerators:
            first = facts.accelerators[0]
            title = f"{len(facts.accelerators)} x {first.name} ({first.platform})"
            return [Finding(severity="ok", title=title), *_no_nccl(context)]
        if facts.driver and not built:
            return [
                Finding(
                    severity="warning",
                    title="a GPU is here, but this torch is a CPU build",
                    cause=f"NVIDIA driver {facts.driver}, torch {torch.get('version')}: "
                    "everything runs on the processor.",
                    fix=f"{python()} -m pip install --force-reinstall torch",
                )
            ]
        if facts.driver:
            return [
                Finding(
                    severity="warning",
                    title="a GPU driver is here, but torch finds no device",
                    cause=f"torch is built for CUDA {torch.get('cuda')}; driver {facts.driver} may "
                    "be too old for it, or the device is hidden or not readable.",
                    fix="nvidia-smi; echo $CUDA_VISIBLE_DEVICES; ls -l /dev/nvidia*",
                )
            ]
        if not built:
            return [Finding(severity="ok", title="no accelerator needed by this torch")]
        version = torch.get("cuda") or torch.get("hip")
        return [
            Finding(
                severity="note",
                title="no accelerator: everything runs on the processor",
                cause=f"This torch is built for CUDA or ROCm ({version}), which takes more disk "
                "and time to import than the build for processors.",
            )
        ]


@checks.register("collectives")
class CollectivesCheck(Check):
    """The library through which ranks on processors speak is there."""

    def run(self, context: Context) -> list[Finding]:
        if not context.torch:
            return []
        if "gloo" in context.torch.get("backends", ()):
            return [Finding(severity="ok", title=_names(context))]
        reason = context.torch.get("distributed_error", "this torch was built without Gloo")
        return [
            Finding(
                severity="warning",
                title="several ranks on processors are not possible",
                cause=f"{reason}.",
                fix=f"{python()} -m pip install --force-reinstall torch",
            )
        ]


def _no_nccl(context: Context) -> list[Finding]:
    facts = context.facts
    several = len(facts.accelerators) > 1 and facts.accelerators[0].kind == "cuda"
    if not several or "nccl" in context.torch.get("backends", ()):
        return []
    return [
        Finding(
            severity="warning",
            title=f"{len(facts.accelerators)} GPUs, but no NCCL",
            cause="Ranks on several GPUs speak through it.",
            fix=f"{python()} -m pip install --force-reinstall torch",
        )
    ]


def _names(context: Context) -> str:
    names = {"gloo": "Gloo", "nccl": "NCCL"}
    return " and ".join(names.get(name, name) for name in context.torch["backends"])


def _working_folder() -> Path:
    try:
        return Path(os.getcwd())
    except OSError:
        return Path("/")


def _existing(folder: Path) -> Path:
    """`folder` or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
