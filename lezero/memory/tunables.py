"""What glibc reads only once, when a process begins: its caches of freed blocks, one a thread.

Note [Thread caches]
torch asks for tensors aligned to 64 bytes, and glibc cuts the piece before such a block off and
frees it. The piece goes into the thread's cache, where it does not join its neighbours. Small
objects settle in it, so that a large block, once freed, lies between things that stay, and the next
one does not fit: a quarter of a step's memory went that way, and how much was chance. Without the
caches pieces join again, and the heap of a step is little more than what is alive in it. Small
blocks then cost some 20 ns more; Python's own objects do not come from there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

from lezero.core.errors import ConfigError
from lezero.core.flags import flag

VARIABLE = "GLIBC_TUNABLES"
_NAME = "glibc.malloc.tcache_count"


def tuned(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process that trains: without glibc's thread caches, unless it already
    says something about them or `LEZERO_POOL=0` asks for the C library as it is."""
    made = dict(environment)
    told = made.get(VARIABLE, "")
    if sys.platform == "linux" and _NAME not in told and flag("LEZERO_POOL"):
        made[VARIABLE] = ":".join([*filter(None, [told]), f"{_NAME}=0"])
    return made


def begin_tuned() -> None:
    """Begins this very program anew under `tuned`, once: to be called before anything else.

    Where that is not possible the program goes on as it is, with a larger heap; a flag that cannot
    be read is told of by who reads it next.
    """
    with contextlib.suppress(ConfigError, OSError):
        wanted = tuned(os.environ)
        if wanted != dict(os.environ) and sys.executable:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
