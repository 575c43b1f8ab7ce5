"""A process beside this one that renders chat templates, since those come with models.

It is started at the first chat, ends with this process, and is started anew when a template ends
it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from lezero.core.errors import LeZeroError

TUPLE, PAIRS = "lezero tuple", "lezero pairs"
"""Keys of what is asked: the items of a tuple, and of a dict that JSON has no form for."""
TEXT, REFUSED, FAILED = b"t", b"r", b"f"
SIZE = 8
"""Bytes of the length before what is asked, and, behind the kind of answer, before its text."""
_RUN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lezero.serve.template_child import main; main(float(sys.argv[2]))"
)


class Ended(Exception):
    """The process ended in the middle of a question."""

    def __init__(self, status: int, seconds: float) -> None:
        endless = f"does not end within {seconds:g} s of processor time"
        other = f"ended its process (status {status})"
        super().__init__(endless if status == -signal.SIGPROF else other)


class TemplateProcess:
    """Answers one question at a time, of any thread. seconds: of a processor, for one answer."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._left)

    def ask(self, question: bytes) -> tuple[bytes, str]:
        """TEXT and the prompt, REFUSED and what the template says, or FAILED and why; raises
        `Ended`."""
        with self._lock:
            process = self._running()
            try:
                _write(process.stdin, len(question).to_bytes(SIZE, "big") + question)
                head = _read(process.stdout, 1 + SIZE)
                text = _read(process.stdout, int.from_bytes(head[1:], "big"))
            except (BrokenPipeError, EOFError):
                raise Ended(process.wait(), self._seconds) from None
            except BaseException:  # the next question would get the answer to this one
                self.close()
                raise
            return head[:1], text.decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Ends the process, where there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close(process)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start(self._seconds)
        return self._process

    def _left(self) -> None:
        """In a process that was forked: the parent's is none of ours, nor a lock that it holds."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # nobody here waits for it
            _close(process)


def _start(seconds: float) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", _RUN, json.dumps(sys.path), str(seconds)]
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for this process
        )
    except OSError as error:
        raise LeZeroError(
            f"chat templates run in a process of their own, which cannot be started: {error}"
        ) from error


def _write(pipe: Any, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[pipe.write(left) :]


def _read(pipe: Any, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = pipe.read(count - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
