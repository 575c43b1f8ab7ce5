"""Limits that control groups put on this process: memory and processor time, versions 1 and 2.

A limit may sit on the group itself or on any group above it, so every level that the mount shows is
read and the tightest one counts. In a container the mount often begins at the container's own
group; `/proc/self/mountinfo` tells where. Sources: the kernel's `cgroup-v1/memory.rst`,
`scheduler/sched-bwc.rst` and `cgroup-v2.rst`. `root` stands for `/`, so that tests can bring their
own tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Mount:
    """A mounted hierarchy; `controllers` is empty for version 2, `top` the group it begins at."""

    controllers: frozenset[str]
    top: str
    point: Path

    @property
    def version(self) -> int:
        return 1 if self.controllers else 2


@dataclass(frozen=True)
class MemoryGroup:
    """Bytes allowed by the tightest group, bytes still free below every limit, and where."""

    limit: int
    free: int
    path: str


def read_text(path: Path) -> str:
    """The text of a small file, stripped; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def memory(root: Path = Path("/")) -> MemoryGroup | None:
    """The memory limit of this process, or None where no group sets one."""
    found = [_memory_at(folder, mount.version) for mount, folder in _folders("memory", root)]
    limits = [item for item in found if item is not None]
    if not limits:
        return None
    tightest = min(limits, key=lambda item: item.limit)
    return MemoryGroup(tightest.limit, min(item.free for item in limits), tightest.path)


def quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that this process may use (2.5 means two and a half), or None."""
    found = []
    for mount, folder in _folders("cpu", root):
        if mount.version == 2:
            word, _, rest = read_text(folder / "cpu.max").partition(" ")
            allowed, period = _number(word), _number(rest)
        else:
            allowed = _number(read_text(folder / "cpu.cfs_quota_us"))
            period = _number(read_text(folder / "cpu.cfs_period_us"))
        if allowed and period and allowed > 0 and period > 0:
            found.append(allowed / period)
    return min(found, default=None)


def mounts(root: Path = Path("/")) -> list[Mount]:
    """The mounted hierarchies, from `/proc/self/mountinfo`."""
    found = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        fields, _, kind = line.partition(" - ")
        words, tail = fields.split(), kind.split()
        if len(words) < 5 or not tail or tail[0] not in ("cgroup", "cgroup2"):
            continue
        options = frozenset(tail[-1].split(",")) - {"rw", "ro"} if tail[0] == "cgroup" else ()
        point = root / _unescaped(words[4]).lstrip("/")
        found.append(Mount(frozenset(options), _unescaped(words[3]), point))
    return found


def _folders(controller: str, root: Path) -> list[tuple[Mount, Path]]:
    """Every group that binds this process, its own first, in each hierarchy of `controller`."""
    own = _membership(root)
    found = []
    for mount in mounts(root):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        path = own.get(controller if mount.version == 1 else "")
        if path is None:
            continue
        folder = _below(mount, path)
        while True:
            found.append((mount, folder))
            if folder == mount.point or mount.point not in folder.parents:
                break
            folder = folder.parent
    return found


def _membership(root: Path) -> dict[str, str]:
    """Controller → group of this process; the empty name stands for version 2."""
    own = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for name in [""] if number == "0" else names.split(","):
            own[name] = path
    return own


def _below(mount: Mount, path: str) -> Path:
    """Where the group `path` is seen under `mount`; the mount itself when it is outside of it."""
    group, top = PurePosixPath(path), PurePosixPath(mount.top)
    if ".." in group.parts or not group.is_relative_to(top):
        return mount.point
    folder = mount.point / group.relative_to(top)
    return folder if folder.is_dir() else mount.point


def _memory_at(folder: Path, version: int) -> MemoryGroup | None:
    if version == 2:
        # Above memory.high the kernel throttles allocations to a crawl: no less a limit than max.
        limits = [_number(read_text(folder / name)) for name in ("memory.max", "memory.high")]
        used, idle = _number(read_text(folder / "memory.current")), "inactive_file"
    else:
        limits = [_number(read_text(folder / "memory.limit_in_bytes"))]
        used, idle = _number(read_text(folder / "memory.usage_in_bytes")), "total_inactive_file"
    given = [limit for limit in limits if limit is not None and 0 <= limit < 1 << 60]
    if not given:
        return None
    limit = min(given)
    cache = 0
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == idle:
            cache = _number(value) or 0
    # Page cache that nobody used lately is given back on demand, so it counts as free.
    free = limit - max(0, (used or 0) - cache)
    return MemoryGroup(limit, max(0, free), str(folder))


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _unescaped(text: str) -> str:
    """mountinfo writes blanks and backslashes as octal numbers."""
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, plain)
    return text
