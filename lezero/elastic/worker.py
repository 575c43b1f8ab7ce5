"""The first steps of a rank: die with the launcher, run the user's program, record its error.

Runs inside every rank before the user's code and imports nothing heavy. An exception is not
printed here: it is written to the file that torch elastic names, in torch's layout with our own
fields beside it, so that the launcher shows the first one once instead of one per rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import sysconfig
import time
import traceback
from types import TracebackType
from typing import Any

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
STARTS = "LEZERO_STARTS"
BOOT = (
    "import sys; sys.path.append({root!r}) if {root!r} not in sys.path else None; "
    "from lezero.elastic.{module} import main; sys.exit(main())"
)


def python_command(module: str) -> list[str]:
    """The command line that runs `main` of one of this package's modules in a new process.

    `-P` keeps the current folder off the module path, where a file of the user's could hide one of
    ours; the user's own program gets its path as Python gives it.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [sys.executable, "-P", "-c", BOOT.format(root=root, module=module)]


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Asks the kernel to send this process a signal when `parent` ends (Linux only)."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + int(number))


def main() -> int:
    """Runs `kind target arguments...` as this rank and returns its exit status.

    The kinds: script (a file), module (as `python -m`), entry (an installed Python command, run in
    this process) and program (anything else, which replaces this process).
    """
    parent, kind, target, *arguments = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGKILL)
    if kind == "program":
        os.execvp(target, [target, *arguments])
    sys.argv = [target, *arguments]
    try:
        return _status(_RUN[kind](target), None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as stop:
        return _status(stop.code, stop)
    except BaseException as error:
        sys.last_value = error  # as Python does; what runs at exit tells the other ranks of it
        _record(_error_fields(error))
        return getattr(error, "exit_status", 1)


def _run_script(path: str) -> None:
    place = sys.modules["__main__"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    for name in [name for name in vars(place) if not name.startswith("__")]:
        delattr(place, name)
    place.__file__ = path
    exec(code, vars(place))


def _run_module(name: str) -> None:
    import runpy

    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_entry(name: str) -> Any:
    from importlib.metadata import entry_points

    (point, *_) = entry_points(group="console_scripts", name=name)
    return point.load()()


_RUN = {"script": _run_script, "module": _run_module, "entry": _run_entry}


def _status(code: Any, stop: SystemExit | None) -> int:
    """The exit status that Python gives `sys.exit(code)`; a failure leaves a record."""
    if code is None or code == 0:
        return 0
    status = code if isinstance(code, int) else 1
    # A command that explains its errors itself leaves the one it explained where Python leaves an
    # uncaught one. The launcher learns from it whether another try could help.
    cause = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if cause is None and stop is not None:
        cause = stop.__context__
    fields = {
        "kind": "exit",
        "status": status,
        "text": "" if isinstance(code, int) else str(code),
        "final": status == 2 or _is_final(cause),
    }
    _record(fields)
    return status


def _error_fields(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    lines = traceback.format_list(own)
    if isinstance(error, SyntaxError):
        lines = traceback.format_exception_only(error)[:-1]
    return {
        "kind": "user" if _is_explained(error) else "exception",
        "type": type(error).__name__,
        "text": str(error),
        "own": "".join(lines),
        "full": "".join(traceback.format_exception(error, limit=_skip_own(error.__traceback__))),
        "final": _is_final(error),
    }


def _is_library(filename: str) -> bool:
    if "site-packages" in filename or "dist-packages" in filename or filename.startswith("<"):
        return True
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    stdlib = sysconfig.get_paths()["stdlib"]
    return os.path.abspath(filename).startswith((ours + os.sep, stdlib + os.sep))


def _skip_own(trace: TracebackType | None) -> int | None:
    """A limit for `format_exception` that leaves out this file's frame at the top."""
    depth = len(list(traceback.walk_tb(trace)))
    return -(depth - 1) if depth > 1 else None


def _is_explained(error: BaseException | None) -> bool:
    errors = sys.modules.get("lezero.core.errors")
    return errors is not None and isinstance(error, errors.LeZeroError)


def _is_final(error: BaseException | None) -> bool:
    """True when starting again cannot help: the program does not load, or the user must act."""
    if isinstance(error, (SyntaxError, ImportError)):
        return True
    if not _is_explained(error):
        return False
    errors = sys.modules["lezero.core.errors"]
    return isinstance(error, errors.UnlikeError) or not isinstance(error, errors.DistributedError)


def _record(fields: dict[str, Any]) -> None:
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    now = time.time()
    text = fields.get("text") or fields["kind"]
    extra = {"py_callstack": fields.get("full", ""), "timestamp": str(int(now))}
    record = {
        "message": {"message": text, "extraInfo": extra},
        "lezero": {**fields, "time": now},
    }
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(record, file)
