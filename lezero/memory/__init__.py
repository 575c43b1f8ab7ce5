"""Where bytes live: the host memory pool."""

from lezero.memory.pool import HostPool, PoolStats

__all__ = ["HostPool", "PoolStats"]
