"""What torch says of itself, asked in a process of its own.

A broken torch may raise, hang, print, or end the process with a signal (an illegal instruction, a
library that aborts). None of that reaches the doctor this way.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from lezero.core.facts import Accelerator
from lezero.core.python import same_imports

_MARK = "lezero-probe:"
_NATIVE_MARK = "lezero-native:"
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Probe:
    """`torch` is empty and `error` says why where torch cannot be used; `warnings` it printed."""

    torch: dict[str, Any] = field(default_factory=dict)
    accelerators: tuple[Accelerator, ...] = ()
    error: str = ""
    warnings: str = ""


def probe(timeout_s: float = _TIMEOUT_S) -> Probe:
    """Imports torch in a new process and asks it; never raises."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            env=same_imports(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = bytes(late.stdout or b"").decode(errors="replace")
        done = subprocess.CompletedProcess(late.cmd, 0, said, "")
        if _MARK not in done.stdout:
            return Probe(error=f"importing torch takes longer than {timeout_s:.0f} s")
    except (OSError, subprocess.SubprocessError) as error:
        return Probe(error=f"Python cannot be started: {error}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    native = [line for line in done.stdout.splitlines() if line.startswith(_NATIVE_MARK)]
    # Torch has answered; what ended the process after that came from a native library.
    if not lines or (done.returncode != 0 and native):
        return Probe(error=_ending(done.returncode, done.stderr))
    try:
        answer = json.loads(lines[-1].removeprefix(_MARK))
        if native:
            answer["native"] = json.loads(native[-1].removeprefix(_NATIVE_MARK))
        elif done.returncode != 0:
            answer["native_error"] = _ending(done.returncode, done.stderr, "loading the native ops")
        found = tuple(Accelerator(**item) for item in answer.pop("accelerators"))
    except (ValueError, TypeError, KeyError) as error:
        return Probe(error=f"torch's answer cannot be read: {error}")
    return Probe(torch=answer, accelerators=found, warnings=done.stderr.strip())


def main() -> None:
    """The asking process: prints one line of JSON on torch, then one on the native ops."""
    import torch

    from lezero.core.facts import find_accelerators

    answer: dict[str, Any] = {
        "version": str(torch.__version__),
        "file": str(torch.__file__),
        "cuda": getattr(torch.version, "cuda", None),
        "hip": getattr(torch.version, "hip", None),
        "threads": torch.get_num_threads(),
        "accelerators": [vars(item) for item in find_accelerators()],
        "backends": [],
        "computes": False,
        "numpy": False,
    }
    answer["accelerator"] = answer["accelerators"][0]["kind"] if answer["accelerators"] else "cpu"
    answer["computes"] = bool((torch.ones(8, 8) @ torch.ones(8, 8)).sum().item() == 512)
    try:
        answer["numpy"] = int(torch.zeros(2).numpy().size) == 2
    except Exception as error:
        answer["numpy_error"] = str(error).splitlines()[0]
    try:
        import torch.distributed as dist

        known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
        answer["backends"] = [name for name, there in known.items() if there()]
    except Exception as error:
        answer["distributed_error"] = str(error).splitlines()[0]
    print(_MARK + json.dumps(answer), flush=True)
    print(_NATIVE_MARK + json.dumps(_native_ops()), flush=True)


def _native_ops() -> list[dict[str, str]]:
    """Of each op with C kernels: its kernel, why there is none, and what runs instead.

    Builds what this machine has not built yet, since only that tells whether it can.
    """
    from lezero.ops.native import natives

    found = []
    for one in natives():
        one.available()
        row = {"name": one.name, "kernel": one.kernel_name(), "otherwise": one.otherwise}
        found.append({**row, "problem": one.problem})
    return found


def _ending(status: int, stderr: str, what: str = "importing torch") -> str:
    """The reason in one line: the exception, or the signal's name."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"{what} ended the process with {name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return (lines or [f"{what} ended the process with status {status}"])[-1][:400]
