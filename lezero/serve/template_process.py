"""A process beside this one that renders chat templates, since those come with models.

It is started at the first chat, ends with this process, and is started anew when a template ends
it.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO

from lezero.core.errors import LeZeroError
from lezero.core.python import same_imports

TUPLE, PAIRS = "lezero tuple", "lezero pairs"
"""Keys of what is asked: the items of a tuple, and of a dict that JSON has no form for."""
TEXT, REFUSED, FAILED = b"t", b"r", b"f"
SIZE = 8
"""Bytes of the length before what is asked, and, behind the kind of answer, before its text."""
READY = b"+"
"""What the process says before it is asked."""
_RUN = (
    "import sys; from lezero.serve.template_child import main; "
    "main(int(sys.argv[1]), float(sys.argv[2]))"
)
_OWN = "chat templates run in a process of their own"


class Ended(Exception):
    """The process ended in the middle of a question."""

    def __init__(self, status: int, seconds: float) -> None:
        endless = f"does not end within {seconds:g} s of processor time"
        other = f"ended its process (status {status})"
        super().__init__(endless if status == -signal.SIGPROF else other)


@dataclass
class _Child:
    """The process, and the end of the pipe that its answers come through: what others print at its
    start is none."""

    process: subprocess.Popen[bytes]
    answers: BinaryIO

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.answers.close()


class TemplateProcess:
    """Answers one question at a time, of any thread. seconds: of a processor, for one answer."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: _Child | None = None
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._left)

    def ask(self, question: bytes) -> tuple[bytes, str]:
        """TEXT and the prompt, REFUSED and what the template says, or FAILED and why; raises
        `Ended`."""
        with self._lock:
            child = self._running()
            try:
                write_all(child.process.stdin, len(question).to_bytes(SIZE, "big") + question)
                head = _read(child.answers, 1 + SIZE)
                text = _read(child.answers, int.from_bytes(head[1:], "big"))
            except (BrokenPipeError, EOFError):
                raise Ended(child.process.wait(), self._seconds) from None
            except BaseException:  # the next question would get the answer to this one
                self.close()
                raise
            return head[:1], text.decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Ends the process, where there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.process.kill()
            child.process.wait()
            child.close()

    def _running(self) -> _Child:
        if self._child is None or self._child.process.poll() is not None:
            self.close()
            self._child = _start(self._seconds)
        return self._child

    def _left(self) -> None:
        """In a process that was forked: the parent's is none of ours, nor a lock that it holds."""
        self._lock = threading.Lock()
        child, self._child = self._child, None
        if child is not None:
            child.process.returncode = 0  # nobody here waits for it
            child.close()


def _start(seconds: float) -> _Child:
    ours, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, str(theirs), str(seconds)],
            env=same_imports(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=(theirs,),
            start_new_session=True,  # Ctrl-C is for this process
        )
    except OSError as error:
        os.close(ours)
        raise LeZeroError(f"{_OWN}, which cannot be started: {error}") from error
    finally:
        os.close(theirs)
    child = _Child(process, os.fdopen(ours, "rb", buffering=0))
    if child.answers.read(len(READY)) != READY:
        status = process.wait()
        child.close()
        raise LeZeroError(f"{_OWN}, which ended with status {status} before it was ready")
    return child


def write_all(pipe: Any, data: bytes) -> None:
    """Through a pipe without a buffer, which may take a part at a time."""
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
