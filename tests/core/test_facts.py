"""Device facts are read from described machines: cgroup trees, cpuinfo, meminfo, broken torch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lezero.core import cgroup, facts

GIB = 2**30
V1_MEMORY = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def machine(root: Path, files: dict[str, str]) -> Path:
    """A tree that stands for `/`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total_gib: float = 64, available_gib: float = 48) -> str:
    total, available = int(total_gib * 2**20), int(available_gib * 2**20)
    return f"MemTotal: {total} kB\nMemFree: 1024 kB\nMemAvailable: {available} kB\nSwapTotal: 2 kB"


def test_without_groups_the_limit_is_the_machine(tmp_path: Path) -> None:
    found = facts.memory(machine(tmp_path, {"proc/meminfo": meminfo()}))
    assert found.total == found.limit == 64 * GIB
    assert found.available == 48 * GIB
    assert found.swap == 2048
    assert found.limited_by == "the machine"


def test_version_2_takes_the_tightest_of_nested_groups(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/"
    root = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "0::/slice/job/step\n",
            "proc/self/mountinfo": V2.format(top="/"),
            base + "slice/memory.max": str(32 * GIB),
            base + "slice/memory.current": str(30 * GIB),
            base + "slice/memory.stat": f"anon 5\ninactive_file {4 * GIB}\n",
            base + "slice/job/memory.max": str(8 * GIB),
            base + "slice/job/memory.high": "max",
            base + "slice/job/memory.current": str(GIB),
            base + "slice/job/step/memory.max": "max\n",
            base + "slice/cpu.max": "150000 100000\n",
            base + "slice/job/step/cpu.max": "max 100000\n",
        },
    )
    found = facts.memory(root)
    assert found.limit == 8 * GIB
    assert found.limited_by.endswith("slice/job")
    assert found.available == 6 * GIB, "the outer group has less left: 32 - (30 - 4)"
    assert cgroup.quota(root) == 1.5
    assert facts.cpu(root, affinity=8).usable == 2
    assert facts.cpu(root, affinity=1).usable == 1


def test_version_2_counts_memory_high_as_a_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2.format(top="/"),
            "sys/fs/cgroup/job/memory.max": str(8 * GIB),
            "sys/fs/cgroup/job/memory.high": str(6 * GIB),
        },
    )
    assert facts.memory_limit(root) == 6 * GIB


def test_version_1_reads_each_controller_where_it_is_mounted(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/"
    root = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "4:memory:/a/b\n1:cpu,cpuacct:/a\n0::/\n",
            "proc/self/mountinfo": f"{V1_MEMORY.format(top='/')}\n{V1_CPU.format(top='/')}\n",
            base + "memory/memory.limit_in_bytes": "9223372036854771712",
            base + "memory/a/memory.limit_in_bytes": str(4 * GIB),
            base + "memory/a/memory.usage_in_bytes": str(3 * GIB),
            base + "memory/a/memory.stat": f"total_inactive_file {GIB}\n",
            base + "memory/a/b/memory.limit_in_bytes": "9223372036854771712",
            base + "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            base + "cpu,cpuacct/cpu.cfs_period_us": "100000",
            base + "cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
            base + "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        },
    )
    found = facts.memory(root)
    assert (found.limit, found.available) == (4 * GIB, 2 * GIB)
    assert facts.cpu(root, affinity=4).quota == 0.5
    assert facts.cpu(root, affinity=4).usable == 1, "never less than one"


@pytest.mark.parametrize("own", ["/docker/abc", "/../../elsewhere", "/docker/abc/unseen"])
def test_in_a_container_the_mount_begins_at_the_own_group(tmp_path: Path, own: str) -> None:
    root = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": f"0::{own}\n",
            "proc/self/mountinfo": V2.format(top="/docker/abc"),
            "sys/fs/cgroup/memory.max": str(2 * GIB),
            "sys/fs/cgroup/cpu.max": "200000 100000",
        },
    )
    assert facts.memory_limit(root) == 2 * GIB
    assert facts.usable_cores(root) == min(2, len(os.sched_getaffinity(0)))


def test_a_limit_above_the_machine_is_no_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(16, 8),
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2.format(top="/"),
            "sys/fs/cgroup/memory.max": str(99 * GIB),
        },
    )
    found = facts.memory(root)
    assert (found.limit, found.available) == (16 * GIB, 8 * GIB)
    assert found.limited_by == "the machine"


def test_garbage_in_the_files_is_no_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: many kB\n\n:::\nMemAvailable\n",
            "proc/self/cgroup": "nonsense\n0::/job\n::\n",
            "proc/self/mountinfo": "x - cgroup2\n" + V2.format(top="/") + "\n1 2 3 4 5 - cgroup\n",
            "sys/fs/cgroup/job/memory.max": "-7",
            "sys/fs/cgroup/job/cpu.max": "0 0 0",
        },
    )
    assert facts.memory(root).total == 0
    assert cgroup.memory(root) is None
    assert cgroup.quota(root) is None


def test_an_unreadable_machine_still_has_facts(tmp_path: Path) -> None:
    found = facts.facts(tmp_path, accelerators=())
    assert found.cpu.usable >= 1
    assert found.cpu.instruction_sets == ()
    assert found.memory.limit == 0
    assert found.driver == ""
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "flags\t\t: fpu sse avx2 avx512f avx512_vnni amx_tile amx_bf16 amx_int8 unknown",
            ("avx2", "avx512f", "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"),
        ),
        (
            "Features\t: fp asimd asimdhp asimddp sve svebf16 bf16 i8mm",
            ("neon", "dotprod", "fp16", "bf16", "i8mm", "sve", "sve_bf16"),
        ),
        ("flags : fpu sse2", ()),
        ("", ()),
    ],
)
def test_instruction_sets(tmp_path: Path, line: str, expected: tuple[str, ...]) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": f"processor : 0\nmodel name : A CPU\n{line}\n"})
    assert facts.instruction_sets(root) == expected
    assert facts.cpu(root).model == "A CPU"
    assert facts.cpu(root).native_bf16 == bool({"amx_bf16", "bf16"} & set(expected))


def test_caches_huge_pages_and_driver(tmp_path: Path) -> None:
    base = "sys/devices/system/cpu/cpu0/cache/index"
    root = machine(
        tmp_path,
        {
            base + "0/level": "1",
            base + "0/type": "Data",
            base + "0/size": "48K",
            base + "1/level": "1",
            base + "1/type": "Instruction",
            base + "1/size": "32K",
            base + "3/level": "3",
            base + "3/type": "Unified",
            base + "3/size": "32M",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64  570.86.15  Thu\nGCC\n",
        },
    )
    assert facts.cpu(root).caches == {"L1d": 48 * 2**10, "L3": 32 * 2**20}
    assert facts.memory(root).huge_pages == "madvise"
    assert facts.nvidia_driver(root) == "570.86.15"


def test_this_machine() -> None:
    found = facts.facts()
    assert 1 <= found.cpu.usable <= found.cpu.affinity <= found.cpu.logical
    assert 0 < found.memory.available <= found.memory.limit <= found.memory.total
    assert found.versions["torch"].startswith("2.")
    assert found.python == platform.python_version()
    assert json.loads(json.dumps(found.to_dict()))["machine_id"] == found.machine_id


def test_the_machine_id_is_stable_and_follows_what_figures_depend_on() -> None:
    one = facts.facts(accelerators=())
    assert one.machine_id == facts.facts(accelerators=()).machine_id
    assert facts.facts().machine_id == facts.machine_id()
    busy = replace(one, memory=replace(one.memory, available=1, shared=2), compilers={})
    assert busy.machine_id == one.machine_id
    gpu = facts.Accelerator("cuda", "cuda", 0, "A GPU", 80 * GIB, "9.0")
    others = [
        replace(one, cpu=replace(one.cpu, usable=one.cpu.usable + 1)),
        replace(one, cpu=replace(one.cpu, model="another")),
        replace(one, versions={**one.versions, "torch": "2.0.0"}),
        replace(one, memory=replace(one.memory, limit=GIB)),
        replace(one, accelerators=(gpu,)),
    ]
    assert len({one.machine_id, *(other.machine_id for other in others)}) == 6


class FakeModule:
    @staticmethod
    def get_device_properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"GPU {index}", total_memory=80 * GIB, major=9, minor=0)


def fake_torch(kind: str, module: object, hip: str | None = None) -> SimpleNamespace:
    accelerator = SimpleNamespace(
        is_available=lambda: True,
        current_accelerator=lambda: SimpleNamespace(type=kind),
        device_count=lambda: 2,
    )
    return SimpleNamespace(
        accelerator=accelerator,
        version=SimpleNamespace(hip=hip),
        get_device_module=lambda _: module,
    )


def test_accelerators_as_torch_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch("cuda", FakeModule))  # type: ignore[arg-type]
    first, second = facts.find_accelerators()
    assert first == facts.Accelerator("cuda", "cuda", 0, "GPU 0", 80 * GIB, "9.0")
    assert second.index == 1
    monkeypatch.setitem(sys.modules, "torch", fake_torch("cuda", FakeModule, "6.4"))  # type: ignore[arg-type]
    assert facts.find_accelerators()[0].platform == "rocm"
    bare = SimpleNamespace(recommended_max_memory=lambda: 16 * GIB)
    monkeypatch.setitem(sys.modules, "torch", fake_torch("mps", bare))  # type: ignore[arg-type]
    assert facts.find_accelerators()[0] == facts.Accelerator("mps", "mps", 0, "mps", 16 * GIB, "")
    monkeypatch.setitem(sys.modules, "torch", fake_torch("npu", SimpleNamespace()))  # type: ignore[arg-type]
    assert facts.find_accelerators()[0].kind == "npu"


def test_a_torch_that_does_not_import_has_no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert facts.find_accelerators() == ()
    assert facts.facts().versions["torch"], "its metadata is still there"


def test_compilers_and_versions_that_are_missing_or_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (("g++", "echo 'g++ 12.2.0'"), ("clang++", "exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nvcc").write_text("#!/nowhere/at/all\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.compilers() == {"g++": "g++ 12.2.0", "clang++": "", "nvcc": ""}
    assert facts.versions(["no-such-package-xyz"]) == {}


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path / "mine"))
    assert facts.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("LEZERO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert facts.cache_folder() == tmp_path / "lezero"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert facts.cache_folder() == tmp_path / "home" / ".cache" / "lezero"
    assert not (tmp_path / "home").exists(), "asking creates nothing"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_limit_on_addresses_is_this_processes_own() -> None:
    code = (
        "import resource\n"
        "from lezero.core import room\n"
        "assert room.address_room() is None\n"
        "most = room.free_memory(4)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, resource.RLIM_INFINITY))\n"
        "print(most, room.free_memory(4), room.free_memory(1), room.address_room())\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))\n"
        "print(room.free_memory())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    most, four, one, room, nothing = map(int, out.stdout.split())
    assert 2 << 30 < room < 3 << 30
    assert four == min(most, room)
    assert one <= room
    assert nothing == 1
