"""The process between `lz launch` and the ranks: torch elastic's agent with our rules on top.

It has a process of its own, so that its signal handlers, its environment and what torch keeps per
process never reach the program that called `launch`.

[Note: why a job comes back after kill -9]
torch elastic by default lets the ranks share the launcher's own key-value store, where the keys of
a dead round mislead the next one: half of the restarts hang. `TORCH_DISABLE_SHARE_RDZV_TCP_STORE`
(set by `launch` for this process tree alone) gives each round a fresh store on a fresh port.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from lezero.core.log import say
from lezero.elastic.failure import Failure, explain, first_cause, read_record
from lezero.elastic.output import Output
from lezero.elastic.worker import ERROR_FILE, STARTS, die_with_parent, python_command

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MONITOR_S = 0.05
_PEER_GRACE_S = 5.0
_READ_S = 60
_TWIN_S = 1.0
_SUBREAPER = 36


class _Logs(LogsSpecs):
    """Tells torch where the streams and error records of each rank go."""

    def __init__(self, folder: Path, output: Output) -> None:
        super().__init__()
        self._folder, self._output, self._round = folder, output, 0

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._round += 1
        errors = {r: str(self._folder / f"error-{self._round}-{r}.json") for r in envs}
        for local, env in envs.items():
            env[ERROR_FILE] = errors[local]
            # torch counts failures alone: not those starts for which a machine came or went.
            env[STARTS] = str(self._round - 1)
        outs, errs = self._output.assign({r: int(env["RANK"]) for r, env in envs.items()})
        return LogsDest(stdouts=outs, stderrs=errs, error_files=errors)


class Agent(LocalElasticAgent):
    """Names the first cause of a failure, stops whole process trees and restarts what may heal."""

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, output: Output, grace_s: float, debug: bool
    ) -> None:
        super().__init__(spec, logs_specs=logs, exit_barrier_timeout=300)
        self._output, self._grace_s, self._debug = output, grace_s, debug
        self._hurry = False
        self._spent = 0
        self.message = ""
        self.status = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Asked before: a rank that fails from here on is for the next turn, not for torch alone,
        # which would start all again without a word.
        running = self._alive()
        if self._failures(worker_group):
            time.sleep(_MONITOR_S)  # the ranks of one accident are not gone at the same instant
            cause = self._awaited(first_cause(self._failures(worker_group)), worker_group)
            self._stop(signal.SIGTERM, _PEER_GRACE_S)
            self._judge(worker_group, self._told_by_first_rank(cause, worker_group))
        elif running:
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _failures(self, worker_group: WorkerGroup) -> list[Failure]:
        found = []
        for local, handler in self._handlers().items():
            code = handler.proc.poll()
            if code:
                rank = worker_group.workers[local].global_rank
                record = read_record(self._pcontext.error_files[local])  # type: ignore[union-attr]
                found.append(Failure(rank, code, record))
        return found

    def _awaited(self, cause: Failure, worker_group: WorkerGroup) -> Failure:
        """`_told_by_first_rank`, after a while in which rank 0 may get so far."""
        end = time.monotonic() + _TWIN_S
        told = self._told_by_first_rank(cause, worker_group)
        while told.rank and _explained(told) and time.monotonic() < end:
            time.sleep(_MONITOR_S)
            told = self._told_by_first_rank(cause, worker_group)
        return told

    def _told_by_first_rank(self, cause: Failure, worker_group: WorkerGroup) -> Failure:
        """Rank 0's failure instead of `cause` when it is the same one, explained by the command.

        Every rank then explains it, and rank 0, which has the terminal, just did: it leaves a
        record before it ends, which may take it a while.
        """
        if not cause.rank or not _explained(cause):
            return cause
        for worker in worker_group.workers:
            if worker.global_rank == 0:
                record = read_record(self._pcontext.error_files[worker.local_rank])  # type: ignore[union-attr]
                told = Failure(0, cause.code, record)
                return told if _explained(told) and record.get("status") == cause.code else cause
        return cause

    def _judge(self, worker_group: WorkerGroup, cause: Failure) -> None:
        """Says what happened; leaves torch no restart where none can help."""
        most = worker_group.spec.max_restarts
        if self._remaining_restarts > 0 and not cause.final:
            self._spent += 1
            again = f"restarting all ranks ({self._spent} of {most})"
            say(f"lezero: rank {cause.rank} {cause.short()}; {again}")
            return
        self._remaining_restarts = 0
        local = next(w.local_rank for w in worker_group.workers if w.global_rank == cause.rank)
        spent = f"; no restart is left of {most}" if most and not cause.final else ""
        tail = self._output.tail(local)
        self.status = cause.status
        self.message = explain(cause, tail, spent, shown=cause.rank == 0, debug=self._debug)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before the ranks start again. Torch's handlers stay: a signal now is the job's first."""
        if self._alive():
            say(
                f"lezero: machines come or go: the ranks have {self._grace_s:g} s to save, "
                "then all start again"
            )
        self._stop(signal.SIGTERM, self._grace_s)
        super()._shutdown(signal.SIGKILL)

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        *arguments: Any,
        **options: Any,
    ) -> None:
        """The end of the job: torch calls it once, at the end of `run`."""
        if self._alive():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._second_signal)
            say(
                f"lezero: stopping; the ranks have {self._grace_s:g} s to save "
                "(the same signal again kills them now)"
            )
        self._stop(death_sig, self._grace_s)
        super()._shutdown(signal.SIGKILL)

    def _second_signal(self, number: int, frame: FrameType | None) -> None:
        self._hurry = True

    def _alive(self) -> bool:
        return any(handler.proc.poll() is None for handler in self._handlers().values())

    def _handlers(self) -> dict[int, Any]:
        return getattr(self._pcontext, "subprocess_handlers", {})

    def _stop(self, number: signal.Signals, grace_s: float) -> None:
        """Signals the ranks, waits, then kills all that is left of their process trees."""
        ranks = [handler.proc for handler in self._handlers().values()]
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)
                rank.send_signal(signal.SIGCONT)  # a stopped rank would not even hear it
        end = time.monotonic() + grace_s
        while any(r.poll() is None for r in ranks) and time.monotonic() < end and not self._hurry:
            time.sleep(0.01)
        rest = psutil.Process().children(recursive=True)
        for process in rest:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for rank in ranks:
            rank.wait()
        own = {rank.pid for rank in ranks}
        psutil.wait_procs([process for process in rest if process.pid not in own], timeout=5)


def _explained(failure: Failure) -> bool:
    """Whether a command explained what only the user can mend."""
    return failure.final and failure.record.get("kind") == "exit"


def main() -> NoReturn:
    """Runs one launcher from the JSON in `argv[1]` and exits with the job's status."""
    for number in _SIGNALS:
        # No function of Python's runs while torch waits for the first launcher, for minutes.
        signal.signal(number, signal.SIG_DFL)
    job = json.loads(sys.argv[1])
    die_with_parent(job["parent"], signal.SIGTERM)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # orphans of a rank come to us
    if not job["debug"]:
        logging.disable(logging.CRITICAL)
    status = _start(job)
    sys.stdout.flush()
    os._exit(status)  # torch's store threads would hold a normal exit back


def _start(job: dict[str, Any]) -> int:
    try:
        handler = _meeting(job)  # a signal meanwhile must leave nothing behind
    except Exception as error:
        return _fail(job, error)
    folder = Path(tempfile.mkdtemp(prefix="lezero-launch-"))
    for number in _SIGNALS:  # until there are ranks
        signal.signal(number, functools.partial(_leave, folder))
    output = Output(folder, job["ranks"], job["show_all"])
    try:
        return _run(job, handler, folder, output)
    finally:
        output.close()
        shutil.rmtree(folder, ignore_errors=True)


def _leave(folder: Path, number: int, _: object) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def _run(job: dict[str, Any], handler: RendezvousHandler, folder: Path, output: Output) -> int:
    agent: Agent | None = None
    try:
        agent = Agent(_spec(job, handler), _Logs(folder, output), output, *_manners(job))
        agent.run()
        handler.shutdown()
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except Exception as error:
        if agent is None or isinstance(error, RendezvousError) or not agent.status:
            return _fail(job, error)
    return _tell(agent)  # also where the job's own failure is the news


def _tell(agent: Agent) -> int:
    if agent.message:
        say(agent.message)
    return agent.status


def _fail(job: dict[str, Any], error: Exception) -> int:
    if job["debug"]:
        import traceback

        traceback.print_exception(error)
    where = job["endpoint"]
    if isinstance(error, RendezvousConnectionError):
        say(f"error: no launcher answers at {where}")
    elif isinstance(error, RendezvousError):
        why = str(error) or f"within the {job['join_timeout_s']} s of --join-timeout"
        say(f"error: fewer than {job['nodes'][0]} machines met at {where}: {why}")
    else:
        say(f"error: the launcher failed: {error}")
    return 1


def _manners(job: dict[str, Any]) -> tuple[float, bool]:
    return job["grace_s"], job["debug"]


def _meeting(job: dict[str, Any]) -> RendezvousHandler:
    """As torch's registry makes one, but the first launcher is waited for as long as the others.

    Torch takes one limit for the connection and for all that is read over it. Afterwards it is
    torch's usual one again: a machine that is lost must not be waited for as one that is to come.
    """
    least, most = job["nodes"]
    params = RendezvousParameters(
        backend="c10d",
        endpoint=job["endpoint"],
        run_id=job["id"],
        min_nodes=least,
        max_nodes=most,
        local_addr="127.0.0.1" if most == 1 else None,
        join_timeout=job["join_timeout_s"],
        read_timeout=job["join_timeout_s"],
    )
    backend, store = create_backend(params)
    store.set_timeout(timedelta(seconds=_READ_S))
    return create_handler(store, backend, params)


def _spec(job: dict[str, Any], handler: RendezvousHandler) -> WorkerSpec:
    program, *start = python_command("worker")
    words = [*start, str(os.getpid()), *job["command"]]
    return WorkerSpec(
        role="rank",
        local_world_size=job["ranks"],
        rdzv_handler=handler,
        entrypoint=program,
        # torch replaces `${local_rank}` in arguments; the user's dollar signs stay as they are.
        args=tuple(word.replace("$", "$$") for word in words),
        max_restarts=job["max_restarts"],
        monitor_interval=_MONITOR_S,
        local_addr="127.0.0.1" if job["nodes"][1] == 1 else None,
    )
