"""The warm rank pool: Gloo ranks in a tenth of a second, for the tests of distributed code.

`ranks(2, function, *args, **keywords)` calls `function` in two fresh processes that have joined a
Gloo group, and returns the two results in rank order. `function` is a plain function at the top of
a test module; arguments and results travel by pickle. An exception in a rank is raised in the test,
with the rank and its traceback as a note; the other ranks are then ended. Ranks see no accelerator:
there may be fewer than ranks, and Gloo moves what lies on the processor.

[Note: why a server of our own]
The server imports torch once and then forks a process a rank on request. It never
computes anything itself, so it has no threads that a fork would lose, and the forked ranks start
with every module loaded. multiprocessing's fork server would import the test runner in each rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = (
    *("torch", "torch.distributed", "torch.nn.parallel", "numpy", "pytest", "lezero"),
    "torch._dynamo",  # torch loads it with the first optimizer
    "torch.distributed.tensor",
    "lezero.plan",
)
JOIN_S = 30.0
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


class RankError(AssertionError):
    """A rank died, hung, or failed with something that cannot be sent to the test."""


class RankPool:
    """Starts the server on first use. Call it to run ranks; close it to end the server."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self.last_start_s = 0.0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        threads: int = 1,
        timeout_s: float = 60.0,
        env: dict[str, str] | None = None,
        **keywords: Any,
    ) -> list[Any]:
        """Runs `function` in ranks 0 … `world_size` - 1 and returns their results in that order.

        Each rank computes with `threads` threads and sees `env` on top of this environment. After
        `timeout_s` every rank is killed and `RankError` names those that had not finished.
        `last_start_s` is then how long the slowest rank took from the request to its first line.
        """
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        job = {
            "world_size": world_size,
            "module": function.__module__,
            "function": function.__qualname__,
            "folder": str(folder),
            "threads": threads,
            "timeout_s": timeout_s,
            "env": {**os.environ, **HIDDEN, **(env or {})},
            "cwd": os.getcwd(),
            "asked": time.monotonic(),
        }
        try:
            (folder / "arguments").write_bytes(pickle.dumps((args, keywords)))
            return self._results(folder, *self._ask(job))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._server is None:
            return
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()
        self._server = None

    def _ask(self, job: dict[str, Any]) -> tuple[list[str], int]:
        if self._server is None or self._server.poll() is not None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", "from tests.ranks import serve; serve()"],
                cwd=Path(__file__).resolve().parents[1],
                env={**os.environ, **HIDDEN},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            job["asked"] = None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        _write(self._server.stdin, job)
        answer = _read(self._server.stdout)
        if answer is None:
            raise RankError("the server of the rank pool died")
        return answer

    def _results(self, folder: Path, ends: list[str], first: int) -> list[Any]:
        results, starts = [], [0.0]
        failures: dict[int, BaseException] = {}
        for rank, end in enumerate(ends):
            try:
                kind, value, start_s = pickle.loads((folder / f"result-{rank}").read_bytes())
            except FileNotFoundError:
                log = (folder / f"log-{rank}").read_text(errors="replace").strip()
                failures[rank] = RankError(f"rank {rank} {end}\n{log[-8000:]}".strip())
                continue
            starts.append(start_s)
            if kind == "error":
                failures[rank] = value
            results.append(value)
        self.last_start_s = max(starts)
        if failures:
            # The first rank that failed is the cause; the others failed or were ended for it.
            raise failures[first] if first in failures else next(iter(failures.values()))
        return results


def _write(stream: Any, value: object) -> None:
    body = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(body)) + body)
    stream.flush()


def _read(stream: Any) -> Any:
    head = stream.read(8)
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0])) if len(head) == 8 else None


def serve() -> None:
    """The server: reads jobs from stdin until it closes, forks their ranks, answers how they ended.

    Forked ranks print to log files, shown by the test that fails.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in PRELOAD:
        importlib.import_module(name)
    while (job := _read(requests)) is not None:
        sys.path[:0] = [path for path in (job["cwd"],) if path not in sys.path]
        with contextlib.suppress(Exception):
            # Loaded here so that no rank has to; what fails is reported by the ranks.
            module = importlib.import_module(job["module"])
            for name in getattr(module, "LOADED_ONCE", ()):
                importlib.import_module(name)
        gc.freeze()  # a collection in a rank would copy every object: a fifth of a second
        _write(answers, _run_job(job))


def _run_job(job: dict[str, Any]) -> tuple[list[str], int]:
    port = _free_port()
    pids = []
    for rank in range(job["world_size"]):
        pid = os.fork()
        if pid == 0:
            _rank_process(job, rank, port)
        pids.append(pid)
    return _wait(pids, job["timeout_s"], Path(job["folder"]))


def _wait(pids: list[int], timeout_s: float, folder: Path) -> tuple[list[str], int]:
    """Waits for the ranks; once one failed the others get two seconds, then all are killed.

    Returns how each ended, and the rank that failed first (-1 when none did).
    """
    deadline = time.monotonic() + timeout_s
    waiting, ends = dict(enumerate(pids)), [""] * len(pids)
    fds = {os.pidfd_open(pid): rank for rank, pid in waiting.items()}
    why, first = f"did not finish in {timeout_s:g} s", -1
    try:
        while waiting:
            ready, _, _ = select.select(list(fds), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                for pid in waiting.values():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
            failed = []
            for rank, pid in list(waiting.items()):
                done, status = os.waitpid(pid, 0 if not ready else os.WNOHANG)
                if not done:
                    continue
                del waiting[rank]
                code = os.waitstatus_to_exitcode(status)
                ends[rank] = _ending(code) if ready else why
                if code != 0 and ready:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + 2)
                    why = "was ended, since another rank failed"
            if failed and first < 0:
                first = min(failed, key=lambda rank: _failed_at(folder, rank))
            for fd in [fd for fd, rank in fds.items() if rank not in waiting]:
                del fds[fd]
                os.close(fd)
    finally:
        for fd in fds:
            os.close(fd)
    return ends, first


def _failed_at(folder: Path, rank: int) -> int:
    """When a rank told its error, in ns; 0 for one that died without a word, before the others."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / f"result-{rank}").stat().st_mtime_ns
    return 0


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _rank_process(job: dict[str, Any], rank: int, port: int) -> None:
    """One rank, from its fork to its end; never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        folder = Path(job["folder"])
        log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()  # where each thread is, if it crashes
        faulthandler.dump_traceback_later(0.9 * job["timeout_s"])  # where it hangs, if it does
        outcome = _call(job, rank, port)
        status = int(outcome[0] == "error")
        (folder / f"part-{rank}").write_bytes(_pickled(outcome, rank))
        os.rename(folder / f"part-{rank}", folder / f"result-{rank}")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _call(job: dict[str, Any], rank: int, port: int) -> tuple[str, Any, float]:
    import torch

    from lezero.core import groups
    from lezero.plan import measure

    # Ranks share the cores with other tests: a forecast does not wait for a quiet moment.
    measure._waiting = dict
    os.chdir(job["cwd"])
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(job["env"])
    world = str(job["world_size"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world)
    os.environ.update(LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(job["threads"])
    start_s = 0.0
    try:
        groups.join(timeout_s=min(JOIN_S, job["timeout_s"]), backend="gloo")
        groups.barrier()  # so that none leaves while another still joins
        if job["asked"] is not None:
            start_s = time.monotonic() - job["asked"]
        function: Any = importlib.import_module(job["module"])
        for name in job["function"].split("."):
            function = getattr(function, name)
        args, keywords = pickle.loads((Path(job["folder"]) / "arguments").read_bytes())
        value = function(*args, **keywords)
        groups.leave()
    except BaseException as error:
        error.add_note(f"in rank {rank} of {world}:\n{traceback.format_exc()}")
        return "error", error, start_s
    return "result", value, start_s


def _pickled(outcome: tuple[str, Any, float], rank: int) -> bytes:
    kind, value, start_s = outcome
    try:
        body = pickle.dumps(outcome)
        pickle.loads(body)
        return body
    except Exception as error:
        text = f"rank {rank}: {error!r}: cannot send {value!r}"
        if kind == "error":
            text = "\n".join([f"rank {rank}: {value!r}", *getattr(value, "__notes__", [])])
        return pickle.dumps(("error", RankError(text), start_s))


def _free_port() -> int:
    """A free port below the range that the system gives to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
