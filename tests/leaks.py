"""What a test must not leave behind: processes, threads, files and environment variables.

A `Snapshot` is taken before and after each test. New processes are found as children, and by a
mark in their environment, so that the orphans of a killed launcher are found as well. Everything
found is cleaned up where that is possible, so that one leak fails one test and not the next one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lezero.core.facts import cache_folder

MARK = "LEZERO_TEST_SESSION"
NATIVE = "LEZERO_TEST_NATIVE"
GRACE_S = 3.0
KERNEL_THREAD = 0x200000  # PF_KTHREAD in /proc/PID/stat
ROOT = Path(__file__).resolve().parents[1]

# torch's compile workers, and the servers that Python, the rank pool and chats keep for a session.
ALLOWED_COMMANDS = (
    "torch/_inductor/compile_worker",
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "tests.ranks",
    "lezero.serve.template_child",
)
ALLOWED_THREADS = ("QueueFeederThread", "TMonitor", "pytest_timeout")
ALLOWED_THREAD_MODULES = ("torch._inductor", "torch.utils", "concurrent.futures")
ALLOWED_VARIABLES = (
    "PYTEST_",
    "COV_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "KMP_",
    "CUDA_MODULE_LOADING",
)
ALLOWED_FILES = ("torchinductor_", "pytest-of-", "pymp-", ".git", ".venv", ".peers", "runs", "site")
ALLOWED_CACHES = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")

# Processes of somebody else, which need no second look.
_foreign: set[int] = set()


@dataclass(frozen=True)
class Snapshot:
    processes: frozenset[int]
    threads: frozenset[int]
    files: frozenset[str]
    variables: dict[str, str]
    folder: str

    @classmethod
    def take(cls) -> Snapshot:
        return cls(_processes(), _threads(), _files(), dict(os.environ), os.getcwd())

    def leaks(self, grace_s: float = GRACE_S) -> list[str]:
        """Describes what came since this snapshot, after giving it `grace_s` to go, and ends it."""
        found = self._folder() + self._variables()
        found += [f"file {path}" for path in sorted(_files() - self.files)]
        deadline = time.monotonic() + grace_s
        while any(running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        processes, threads = running
        for pid in processes:
            found.append(f"process {pid}: {_command(pid)[:200]}")
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return found + [f"thread {thread.name}" for thread in threads]

    def _running(self) -> tuple[list[int], list[threading.Thread]]:
        processes = sorted(_processes() - self.processes)
        threads = [
            thread
            for thread in threading.enumerate()
            if thread.ident not in self.threads and not _allowed_thread(thread)
        ]
        return processes, threads

    def _folder(self) -> list[str]:
        try:
            now = os.getcwd()
        except FileNotFoundError:
            now = "a folder that is gone"
        if now == self.folder:
            return []
        os.chdir(self.folder)
        return [f"working folder {now}"]

    def _variables(self) -> list[str]:
        before, now = self.variables, dict(os.environ)
        found = []
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) == now.get(name) or name.startswith(ALLOWED_VARIABLES):
                continue
            found.append(f"environment variable {name}")
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
        return found


def start_session() -> str:
    """Gives this test session its mark and a temporary folder of its own; returns the folder.

    Native kernels are those of the user's cache, where a digest of its sources names each; whatever
    is measured goes to a cache of the session's own.
    """
    os.environ[MARK] = str(os.getpid())
    kept = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", kept)
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled_code(Path(kept)))
    folder = tempfile.mkdtemp(prefix="lz-tests-")
    if NATIVE not in os.environ:  # else the session that started this worker has made it
        os.environ[NATIVE] = str(cache_folder() / "native")
        os.makedirs(os.environ[NATIVE], exist_ok=True)
    os.environ["LEZERO_CACHE"] = str(own_cache(Path(folder, ".cache")))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


def compiled_code(kept: Path) -> Path:
    """This user's folder of code that torch compiled, which nobody else may write to."""
    folder = kept / f"torchinductor_tests_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RuntimeError(f"{folder}: not a folder of this user alone; remove it")
    return folder


def own_cache(folder: Path) -> Path:
    """Makes `folder` a cache of LeZero that shares its native libraries with the user's."""
    folder.mkdir(exist_ok=True)
    (folder / "native").symlink_to(os.environ[NATIVE])
    return folder


def _files() -> frozenset[str]:
    found = set()
    for folder in {str(ROOT), os.getcwd(), tempfile.gettempdir()}:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(folder):
                if not name.startswith(ALLOWED_FILES) and name not in ALLOWED_CACHES:
                    found.add(os.path.join(folder, name))
    return frozenset(found)


def _threads() -> frozenset[int]:
    return frozenset(thread.ident for thread in threading.enumerate() if thread.ident is not None)


def _allowed_thread(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", "") or ""
    if type(thread).__module__.startswith("tqdm"):  # Inductor's progress bar
        return True
    return thread.name.startswith(ALLOWED_THREADS) or module.startswith(ALLOWED_THREAD_MODULES)


def _processes() -> frozenset[int]:
    """Living processes that this session started, directly or not."""
    me = os.getpid()
    mark = f"{MARK}={me}\0".encode()
    found = set()
    listed = os.listdir("/proc")
    _foreign.intersection_update(int(name) for name in listed if name.isdigit())  # or given anew
    for name in listed:
        if not name.isdigit() or int(name) == me or int(name) in _foreign:
            continue
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            state, parent = stat[0], int(stat[1])
            if state in "ZX":
                continue
            ours = not int(stat[6]) & KERNEL_THREAD and (
                parent == me or mark in Path(f"/proc/{name}/environ").read_bytes() + b"\0"
            )
            if not ours:
                _foreign.add(int(name))
            elif not any(part in _command(int(name)) for part in ALLOWED_COMMANDS):
                found.add(int(name))
    return frozenset(found)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""
