"""Paths as users write them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from lezero.core.errors import FileError


def expand_home(path: str | os.PathLike[str]) -> str:
    """`path`, where a leading `~` or `~name` stands for that user's home; `$NAME` stays as it is.

    Raises `FileError` for what is no path, and where there is no such user: the folder `~name` that
    would be made instead is what nobody means.
    """
    if not isinstance(path, str | os.PathLike):
        raise FileError(f"got a {type(path).__name__} where a path belongs; give text or a Path")
    text = os.fspath(path)
    if "\0" in text:
        raise FileError(f"{text!r}: a path cannot hold the character NUL")
    found = os.path.expanduser(text)
    if not found.startswith("~"):
        return found
    first = text.replace(os.sep, "/").partition("/")[0]
    known = f"there is no user '{first[1:]}' on this machine" if first[1:] else "HOME is not set"
    raise FileError(
        f"{text}: {known}, so {first} is no home folder; write the path from "
        "the root (also of a file whose name begins with ~)"
    )


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading, through links too. A pipe would keep whoever opens it waiting, and
    a device may have no end: `FileError` for what is no regular file, else `OSError` as `open`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        what = "not a regular file (a folder, a pipe or a link to nothing)"
        raise FileError(f"{os.fspath(path)}: {what}; put the file itself there")
    return open(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file as `open_regular` opens it; `FileError` for more than `most`."""
    with open_regular(path) as file:
        large = os.fstat(file.fileno()).st_size > most  # a sparse one costs its maker nothing
        raw = b"" if large else file.read(most + 1)
    if large or len(raw) > most:
        raise FileError(f"{os.fspath(path)}: larger than {most >> 20} MiB; it is another file")
    return raw


def shown(path: Path) -> Path:
    """`path` as people read it best: from here, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
