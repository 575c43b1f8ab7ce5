"""Frames of other threads, read while those threads go on.

[Note: frames that end while they are read]
Python makes the object of a frame when somebody asks for it. Before 3.12 making an object may begin
a garbage collection at once; that may run code that lets other threads go on, and by its end the
frame may have returned and its memory be another's. What is read then is no frame: an
AttributeError of something that has no `f_code`, or the end of the process. So there is no
collection meanwhile. From 3.12 on one begins between two instructions only.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_COLLECTS_AT_ONCE = sys.version_info < (3, 12)
_reading = threading.RLock()


@contextmanager
def frames_stay() -> Iterator[None]:
    """What other threads run may be read within: `sys._current_frames` and `f_back`."""
    if not _COLLECTS_AT_ONCE:
        yield
        return
    with _reading:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


# A process that is forked meanwhile would go on without a collector.
os.register_at_fork(
    before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release
)
