"""Damaged files in torch's cache of compiled code.

A process that is stopped while the C++ compiler writes can leave a part of a library there, which
torch then opens in each later run, in vain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from lezero.core.log import logger

log = logger("train")

_DAMAGED = re.compile(r"file too short|\bELF\b|object file has no |cannot read file data")
"""What the loader of glibc says of such a library."""
_seen: set[str] = set()


def drop_damaged(error: BaseException) -> bool:
    """Whether what failed is that a library in torch's cache is damaged, and it is gone now, so
    that it is made anew; for each library once. On a machine that ranks share, one that another
    rank has removed counts too."""
    path = next(filter(None, map(_library, _causes(error))), "")
    if not path or path in _seen or not _is_cached(path):
        return False
    _seen.add(path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    log.warning("%s, of torch's cache of compiled code, was damaged; it is made anew", path)
    return True


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it was made of."""
    met: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in met:
        yield each
        met.add(id(each))
        each = getattr(each, "inner_exception", None) or each.__cause__ or each.__context__


def _library(error: BaseException) -> str:
    """The library that the loader calls damaged, in "/path/of.so: file too short"; "" for none."""
    if not isinstance(error, ImportError | OSError):
        return ""
    path, _, said = str(error).partition(".so: ")
    return f"{path}.so" if os.path.isabs(path) and _DAMAGED.search(said) else ""


def _is_cached(path: str) -> bool:
    """Whether a path leads, without a link at its end, to a file in torch's cache or to nothing."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
        return False
    return os.path.realpath(path).startswith(os.path.realpath(cache_dir()) + os.sep)
