"""What this machine is: cores, instruction sets, memory, accelerators, versions, compilers.

Nothing is measured here and nothing is remembered: each call reads the machine as it is now. A
question that cannot be answered (an unreadable `/proc`, a torch that does not import) has an empty
answer and never raises. `root` stands for `/`, so that tests can describe another machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lezero.core import cgroup
from lezero.core.cgroup import read_text
from lezero.core.flags import flag
from lezero.core.paths import expand_home

ROOT = Path("/")

# Name in /proc/cpuinfo → our name, where they differ. Others of `_SETS` are named alike.
_RENAMED = {"asimd": "neon", "asimddp": "dotprod", "asimdhp": "fp16"}
_RENAMED |= {"svebf16": "sve_bf16", "svei8mm": "sve_i8mm"}
_SETS = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("neon", "dotprod", "fp16", "bf16", "i8mm", "sve", "sve2", "sve_bf16", "sve_i8mm", "sme"),
)
_MAC_FEATURES = {
    "hw.optional.avx2_0": "avx2",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.neon": "neon",
    "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.arm.FEAT_FP16": "fp16",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
}
_PACKAGES = (
    *("lezero", "torch", "numpy", "safetensors", "pydantic", "triton", "pytorch-triton"),
    *("tokenizers", "transformers", "gguf", "tensorboard", "torchvision", "timm"),
    *("torch_npu", "intel_extension_for_pytorch"),
)
_COMPILERS = ("g++", "clang++", "nvcc", "hipcc", "icpx")


@dataclass(frozen=True)
class Cpu:
    """Processors. `usable` is what a program should use: the affinity, cut by the group's quota.

    `caches` maps L1d, L2 and L3 to the bytes of one such cache. `quota` counts processors.
    """

    model: str
    architecture: str
    logical: int
    affinity: int
    quota: float | None
    usable: int
    instruction_sets: tuple[str, ...]
    caches: dict[str, int]

    @property
    def native_bf16(self) -> bool:
        """True where the processor multiplies bfloat16 in hardware."""
        return bool({"amx_bf16", "avx512_bf16", "bf16", "sve_bf16"} & set(self.instruction_sets))


@dataclass(frozen=True)
class Memory:
    """Bytes of host memory. `limit` is the total or a group's limit, named in `limited_by`."""

    total: int
    available: int
    limit: int
    limited_by: str
    swap: int
    shared: int
    huge_pages: str


@dataclass(frozen=True)
class Accelerator:
    """One device. `kind` is torch's name ("cuda", "xpu", "npu", "mps"), `platform` the maker's
    ("cuda", "rocm", …), `memory` bytes, `capability` "9.0" or another mark of its generation."""

    kind: str
    platform: str
    index: int
    name: str
    memory: int
    capability: str


@dataclass(frozen=True)
class Facts:
    """Everything known about the machine without measuring. `driver` is NVIDIA's, also where torch
    cannot use it; `versions` has the installed packages only, `compilers` name → version line."""

    system: str
    python: str
    cpu: Cpu
    memory: Memory
    accelerators: tuple[Accelerator, ...]
    driver: str
    versions: dict[str, str]
    compilers: dict[str, str]

    @property
    def machine_id(self) -> str:
        """Digest of what measured figures depend on; the same as long as that is the same."""
        parts = {
            "cpu": [self.cpu.model, self.cpu.architecture, *self.cpu.instruction_sets],
            "cores": [self.cpu.usable, self.cpu.quota],
            "memory_gib": [round(self.memory.total / 2**30), round(self.memory.limit / 2**30)],
            "torch": self.versions.get("torch", ""),
            "accelerators": [[a.platform, a.name, a.memory >> 30] for a in self.accelerators],
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values, `machine_id` included."""
        return {"machine_id": self.machine_id, **_plain(asdict(self))}


def facts(root: Path = ROOT, accelerators: Iterable[Accelerator] | None = None) -> Facts:
    """Reads the machine. `accelerators` given: torch is not asked (nor imported)."""
    found = find_accelerators() if accelerators is None else accelerators
    return Facts(
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        cpu=cpu(root),
        memory=memory(root),
        accelerators=tuple(found),
        driver=nvidia_driver(root),
        versions=versions(),
        compilers=compilers(),
    )


def machine_id() -> str:
    """`facts().machine_id`: the key under which measured figures are kept."""
    return facts().machine_id


def cpu(root: Path = ROOT, affinity: int | None = None) -> Cpu:
    """The processors this process may run on. `affinity` overrides the kernel's answer."""
    logical = os.cpu_count() or 1
    if affinity is None:
        asked = getattr(os, "sched_getaffinity", None)
        affinity = len(asked(0)) if asked else logical
    quota = cgroup.quota(root)
    usable = affinity if quota is None else min(affinity, max(1, int(quota + 0.5)))
    return Cpu(
        model=_cpu_model(root),
        architecture=platform.machine(),
        logical=logical,
        affinity=affinity,
        quota=quota,
        usable=usable,
        instruction_sets=instruction_sets(root),
        caches=_caches(root),
    )


def usable_cores(root: Path = ROOT) -> int:
    """How many threads can run at once: affinity and the control group's quota together."""
    return cpu(root).usable


def instruction_sets(root: Path = ROOT) -> tuple[str, ...]:
    """Those of `avx2`, `avx512_vnni`, `amx_bf16`, `neon`, `i8mm` … that the processor has."""
    if sys.platform == "darwin" and root == ROOT:
        output = _output("sysctl", "hw.optional")
        on = {line.split(":")[0] for line in output.splitlines() if line.endswith(": 1")}
        found = {ours for theirs, ours in _MAC_FEATURES.items() if theirs in on}
    else:
        words = _cpuinfo(root, "flags") or _cpuinfo(root, "Features")
        found = {_RENAMED.get(word, word) for word in words.split()}
    return tuple(name for name in _SETS if name in found)


def memory(root: Path = ROOT) -> Memory:
    """Host memory and the tightest limit on it."""
    info = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        info[name] = int(number[0]) * 1024 if number and number[0].isdigit() else 0
    if "MemTotal" not in info and root == ROOT:
        info = _psutil_memory()
    total = info.get("MemTotal", 0)
    available = info.get("MemAvailable", info.get("MemFree", 0))
    limit, limited_by = total, "the machine"
    group = cgroup.memory(root)
    if group is not None and (group.limit < total or not total):
        limit, limited_by = group.limit, f"control group {group.path}"
        available = min(available, group.free) if total else group.free
    return Memory(
        total=total,
        available=available,
        limit=limit,
        limited_by=limited_by,
        swap=info.get("SwapTotal", 0),
        shared=_shared_memory(root),
        huge_pages=_chosen(read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
    )


def memory_limit(root: Path = ROOT) -> int:
    """Bytes of host memory that this process may use at most; 0 when that is unknown."""
    return memory(root).limit


def find_accelerators() -> tuple[Accelerator, ...]:
    """The devices that torch can use: CUDA, ROCm, XPU, MPS, or a plug-in's (NPU and others)."""
    try:
        import torch

        if not torch.accelerator.is_available():
            return ()
        current = torch.accelerator.current_accelerator()
        if current is None:
            return ()
        kind = current.type
        count = torch.accelerator.device_count()
        hip = getattr(torch.version, "hip", None)
        name = "rocm" if kind == "cuda" and hip else kind
        return tuple(_accelerator(torch, kind, name, index) for index in range(count))
    except Exception:
        return ()


def nvidia_driver(root: Path = ROOT) -> str:
    """The version of the NVIDIA driver, "present" if it does not say, empty if there is none."""
    text = read_text(root / "proc/driver/nvidia/version")
    for line in text.splitlines():
        if line.startswith("NVRM"):
            words = [word for word in line.split() if word[0].isdigit() and "." in word]
            return words[0] if words else "present"
    return "present" if text or (root / "dev/nvidiactl").exists() else ""


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Installed version of each package, read from its metadata: nothing is imported."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package) or "unknown"
        except Exception:
            continue
    return found


def compilers(names: Iterable[str] = _COMPILERS) -> dict[str, str]:
    """The first line with a version that each installed compiler prints."""
    found = {}
    for name in names:
        if shutil.which(name):
            lines = [line.strip() for line in _output(name, "--version").splitlines()]
            known = [line for line in lines if any(mark.isdigit() for mark in line)]
            release = [line for line in known if "release" in line]
            found[name] = (release or known or [""])[0]
    return found


def cache_folder() -> Path:
    """Where measured figures and compiled kernels are kept; not created here.

    `LEZERO_CACHE`, else `$XDG_CACHE_HOME/lezero`, else `~/.cache/lezero`, else a temporary folder.
    """
    named = flag("LEZERO_CACHE")
    if named:
        return Path(expand_home(named)).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "lezero"
    try:
        return Path.home() / ".cache" / "lezero"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "lezero"


def _accelerator(torch: Any, kind: str, platform_name: str, index: int) -> Accelerator:
    module = torch.get_device_module(kind)
    name, size, capability = kind, 0, ""
    try:
        properties = module.get_device_properties(index)
        name = str(getattr(properties, "name", kind))
        size = int(getattr(properties, "total_memory", 0))
        if hasattr(properties, "major"):
            capability = f"{properties.major}.{properties.minor}"
    except Exception:
        if hasattr(module, "recommended_max_memory"):
            size = int(module.recommended_max_memory())
    return Accelerator(kind, platform_name, index, name, size, capability)


def _cpuinfo(root: Path, key: str) -> str:
    for line in read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _cpu_model(root: Path) -> str:
    for key in ("model name", "Model", "cpu model", "Hardware"):
        found = _cpuinfo(root, key)
        if found:
            return found
    if root == ROOT and sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine()
    return platform.machine() or "unknown"


def _caches(root: Path) -> dict[str, int]:
    found = {}
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = read_text(folder / "level"), read_text(folder / "type")
        size = read_text(folder / "size")
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1:], 0)
        if level.isdigit() and kind in ("Data", "Unified") and scale and size[:-1].isdigit():
            found[f"L{level}{'d' if level == '1' else ''}"] = int(size[:-1]) * scale
    return found


def _shared_memory(root: Path) -> int:
    try:
        state = os.statvfs(root / "dev/shm")
    except (OSError, AttributeError):
        return 0
    return state.f_bavail * state.f_frsize


def _psutil_memory() -> dict[str, int]:
    try:
        import psutil

        now = psutil.virtual_memory()
        return {"MemTotal": now.total, "MemAvailable": now.available}
    except Exception:
        return {}


def _chosen(text: str) -> str:
    """The word in brackets, as the kernel marks the setting in force."""
    return text.partition("[")[2].partition("]")[0]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
