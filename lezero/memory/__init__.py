"""Where bytes live: the host memory pool, and what glibc must be told before it."""

from lezero.memory.pool import HostPool, PoolStats
from lezero.memory.tunables import begin_tuned, tuned

__all__ = ["HostPool", "PoolStats", "begin_tuned", "tuned"]
