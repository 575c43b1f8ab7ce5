"""Starting a program on several ranks and keeping them alive.

`launch(LaunchConfig(ranks=2), ["train.py", "--steps", "10"])` starts torch elastic in a process of
its own: when a rank dies, all ranks are stopped and started again, and the program resumes from its
last checkpoint. Nothing of it reaches the calling process but the exit status.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from types import FrameType
from typing import Any, Self

import psutil
from pydantic import Field, field_validator, model_validator

from lezero.core import groups
from lezero.core.config import Config
from lezero.core.errors import CapacityError, ConfigError, DistributedError
from lezero.core.facts import usable_cores
from lezero.core.flags import flag
from lezero.core.paths import expand_home
from lezero.elastic.worker import ERROR_FILE, STARTS, python_command

_PRIVATE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_MARK = "LEZERO_LAUNCH"
"""In the environment of every process of one launcher: which one. Run ids are for all machines."""
_ENDING_S = 5.0
_RANK_KEYS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", ERROR_FILE, STARTS),
)


class LaunchConfig(Config):
    """How a program is started on several ranks."""

    ranks: int = Field(1, ge=1, le=4096)
    """Processes on this machine."""
    nodes: str = "1"
    """Machines: a number, or "least:most" for a job that may grow and shrink."""
    address: str = ""
    """The machine where the launchers meet (its name or address); needed with several machines."""
    port: int = Field(0, ge=0, le=65535)
    """The port where the launchers meet; 0 takes a free one (one machine only)."""
    max_restarts: int = Field(3, ge=0, le=100_000)
    """How many times all ranks are started again after one has died."""
    grace_s: float = Field(30.0, ge=0, le=86_400)
    """Seconds that the ranks have to save and end after Ctrl-C or SIGTERM."""
    threads: int = Field(0, ge=0, le=4096)
    """Threads of each rank (OMP_NUM_THREADS); 0 keeps the environment's, else cores / ranks."""
    oversubscribe: bool = False
    """Allows more ranks than usable cores."""
    show_all: bool = False
    """Shows the stdout of every rank; otherwise only rank 0's."""
    join_timeout_s: int = Field(600, ge=1, le=86_400)
    """Seconds that the launchers wait for each other."""
    quiet: bool = False
    """Leaves out the line that says how many ranks and threads are started."""
    debug: bool = False
    """Shows whole tracebacks and torch elastic's own messages."""

    @field_validator("nodes")
    @classmethod
    def _some_machines(cls, value: str) -> str:
        found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", value)
        if not found or int(found[1]) > int(found[2] or found[1]):
            raise ValueError("allowed is a number of machines, or least:most, as in 1:4")
        return value

    @model_validator(mode="after")
    def _machines_can_meet(self) -> Self:
        if self.node_range()[1] > 1 and not (self.address and self.port):
            raise ValueError(
                f"nodes: {self.nodes} machines need the address and port where they meet: "
                "give --address and --port, the same on each"
            )
        return self

    def node_range(self) -> tuple[int, int]:
        """The least and the most machines."""
        least, _, most = self.nodes.partition(":")
        return int(least), int(most or least)


def restarts() -> int:
    """How often the launcher has started the ranks again (0 the first time, and without one).

    Raises `ConfigError` where TORCHELASTIC_RESTART_COUNT is no whole number.
    """
    return int(flag("TORCHELASTIC_RESTART_COUNT"))


def launch(
    config: LaunchConfig,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> int:
    """Runs `command` on `config.ranks` ranks and returns the job's exit status.

    `command` is `["script.py", ...]`, `["-m", "package.module", ...]`, an installed Python command
    such as `["lz", "train", ...]`, or any program. Each rank finds RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RESTART_COUNT in its environment; `env` adds to it.

    The status is 0, the failing rank's own (128 + n when signal n killed it), 130 after Ctrl-C or
    143 after SIGTERM; the message about a failure has then been printed to stderr. Raises
    `ConfigError` (no such program), `CapacityError` (more ranks than cores) and `DistributedError`
    (the port is in use, no network interface is up) before anything is started.
    """
    resolved = _resolve(list(command), cwd)
    groups.need_interface()  # the ranks meet over one, and would look for it for minutes
    threads = _threads(config, env or {})
    endpoint = _endpoint(config)
    mark = uuid.uuid4().hex
    job = {
        **config.to_dict(),
        "nodes": config.node_range(),
        "command": resolved,
        "endpoint": endpoint,
        "parent": os.getpid(),
        "id": f"lezero-{mark}" if config.node_range()[1] == 1 else "lezero",
    }
    if not config.quiet:
        many = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
        each = "1 thread" if threads == 1 else f"{threads} threads"
        print(f"lezero: {many}, {each} each (OMP_NUM_THREADS)", file=sys.stderr, flush=True)
    process = subprocess.Popen(
        [*python_command("agent"), json.dumps(job)],
        env={**_environment(config, env or {}, threads), _MARK: mark},
        cwd=cwd,
        start_new_session=True,  # Ctrl-C reaches the ranks through us, once
    )
    try:
        with _forwarding(process):
            status = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if status < 0:
        _sweep(mark)
        return 128 - status
    return status


def _resolve(command: list[str], cwd: str | os.PathLike[str] | None) -> list[str]:
    """Turns a command line into kind, target and arguments; `ConfigError` when it is not there."""
    if not command:
        raise ConfigError("nothing to launch: name a script, -m and a module, or a command")
    name, *rest = command
    if name == "-m":
        if not rest:
            raise ConfigError("-m: name the module to run")
        return ["module", *rest]
    if name.endswith(".py"):
        path = os.path.join(cwd or "", name)
        if not os.path.isfile(path):
            what = "is a folder" if os.path.isdir(path) else "no such file"
            raise ConfigError(f"{name}: {what}; it was to be launched as a Python script")
        return ["script", name, *rest]
    entry = _installed_script(name, cwd)
    if _is_console_script(entry):
        return ["entry", entry, *rest]
    if shutil.which(name) is None:
        words = name.split()
        if len(words) > 1 and (_is_console_script(words[0]) or shutil.which(words[0])):
            raise ConfigError(
                f"{name!r}: no such program; give a program and its arguments as words of their "
                f"own, without the quotes around all of them: lz launch -n 2 {name}"
            )
        if name.endswith((".yaml", ".yml")):
            raise ConfigError(f"{name}: a config is no program; launch `lz train {name}`")
        raise ConfigError(
            f"{name}: no such program; launch a script that ends in .py, -m and a module, "
            "or a program that is on the PATH"
        )
    return ["program", name, *rest]


def _is_console_script(name: str) -> bool:
    return any(True for _ in entry_points(group="console_scripts", name=name))


def _installed_script(name: str, cwd: str | os.PathLike[str] | None) -> str:
    """The command's bare name where `name` is a path to it among this Python's own scripts."""
    if not os.path.dirname(name):
        return name
    path = os.path.realpath(os.path.join(cwd or "", expand_home(name)))
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    places = [os.path.realpath(sysconfig.get_path("scripts", scheme)) for scheme in schemes]
    return os.path.basename(path) if os.path.dirname(path) in places else name


def _threads(config: LaunchConfig, env: Mapping[str, str]) -> int:
    cores = usable_cores()
    if config.ranks > cores and not config.oversubscribe:
        raise CapacityError(
            f"{config.ranks} ranks are more than the {cores} usable cores of this machine; "
            f"start at most {cores}, or add --oversubscribe to share cores (slower)"
        )
    if config.threads:
        return config.threads
    given = env.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else max(1, cores // config.ranks)


def _endpoint(config: LaunchConfig) -> str:
    if config.node_range()[1] > 1:
        return f"{config.address}:{config.port}"
    if config.port:
        with socket.socket() as probe:
            # As the store itself does, so that a port that only lingers counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", config.port))
            except OSError as error:
                raise DistributedError(
                    f"port {config.port} cannot be used ({error.strerror}); give another with "
                    "--port, or leave --port out to take a free one"
                ) from None
    return f"localhost:{config.port}"


def _environment(config: LaunchConfig, env: Mapping[str, str], threads: int) -> dict[str, str]:
    made = {key: value for key, value in os.environ.items() if key not in _RANK_KEYS}
    made |= env
    made["OMP_NUM_THREADS"] = str(threads)
    made[_PRIVATE_STORE] = "1"
    made.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice on options is not for users
    if config.node_range()[1] == 1 and os.path.exists("/sys/class/net/lo"):
        # One machine needs no name service: Gloo would look the host's own name up.
        made.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return made


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Passes Ctrl-C, SIGTERM and SIGHUP (not under `nohup`) on to the agent while it runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _sweep(mark: str) -> None:
    """Kills what a killed agent left behind: every process that carries this launch's mark. Returns
    when they have ended, or after a few seconds."""
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark:
                process.kill()
                killed.append(process)
    until = time.monotonic() + _ENDING_S
    while any(map(_runs, killed)) and time.monotonic() < until:
        time.sleep(0.005)


def _runs(process: psutil.Process) -> bool:
    """A zombie has ended: who started it has not asked for its status yet, and may never do so."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
