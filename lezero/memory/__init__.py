"""Where bytes live: the host memory pool, the allocator of tensors under it, huge pages."""

from lezero.memory.allocator import (
    OVERHEAD,
    can_come_from_malloc,
    recorded,
    tensors_from_malloc,
)
from lezero.memory.huge_pages import HugePages, huge_room
from lezero.memory.pool import HostPool, PoolStats

__all__ = [
    "OVERHEAD",
    "HostPool",
    "HugePages",
    "PoolStats",
    "can_come_from_malloc",
    "huge_room",
    "recorded",
    "tensors_from_malloc",
]
