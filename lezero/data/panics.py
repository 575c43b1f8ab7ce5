"""Tokenizers in Rust that panic: what they raise then is no `Exception`, so that it would pass by
whoever ends one answer, or one file, for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lezero.core.errors import FileError

Value = TypeVar("Value")
_WORD = "a"


def without_panic(work: Callable[[Any], Value], given: Any) -> Value:
    """What a tokenizer makes of something; a panic is raised as `RuntimeError`."""
    try:
        return work(given)
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def need_sound(inner: Any, file: Path) -> None:
    """Raises `FileError` where a tokenizer of the package `tokenizers`, from `file`, cannot encode
    a word, as where it puts tokens around texts that it does not have."""
    try:
        without_panic(inner.encode, _WORD)
    except Exception as error:  # the package raises plain Exception
        raise FileError(
            f"{file}: the tokenizer fails ({error}); copy the model's file again"
        ) from None
