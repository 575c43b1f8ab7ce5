"""Words in shared memory by which processes of one host wait for each other."""

from lezero.ops.signal.words import available, reached, read, wait, write

__all__ = ["available", "reached", "read", "wait", "write"]
