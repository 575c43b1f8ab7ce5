"""Where bytes live: the host memory pool and the allocator of tensors under it."""

from lezero.memory.allocator import OVERHEAD, can_come_from_malloc, tensors_from_malloc
from lezero.memory.pool import HostPool, PoolStats

__all__ = ["OVERHEAD", "HostPool", "PoolStats", "can_come_from_malloc", "tensors_from_malloc"]
