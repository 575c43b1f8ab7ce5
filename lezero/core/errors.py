"""What LeZero raises. Every message says what was given, what is allowed and what to do."""

from __future__ import annotations

from dataclasses import dataclass


class LeZeroError(Exception):
    """Base of every error that LeZero raises on purpose. Its text is meant for the user."""

    exit_status = 1


class ConfigError(LeZeroError, ValueError):
    """A value that the user wrote is not allowed. `problems` lists each field with its reason."""

    exit_status = 2

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


@dataclass(frozen=True)
class Problem:
    """One bad field of a config: its path, the value found and why it is refused."""

    path: tuple[str | int, ...]
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.reason}" if self.path else self.reason


class MissingExtraError(LeZeroError, ImportError):
    """An optional dependency is not installed; the text names the extra that brings it."""


class FileError(LeZeroError, ValueError):
    """A file is missing, unreadable, of an unknown format or not what it claims to be."""


class CorruptError(FileError):
    """Stored bytes are not the bytes that were written (torn, truncated or flipped)."""


class CapacityError(LeZeroError):
    """What was asked does not fit this machine. Told before anything is allocated."""


class DistributedError(LeZeroError, RuntimeError):
    """Ranks cannot meet, differ from each other, or one of them failed."""


class UnlikeError(DistributedError):
    """Ranks were given unlike models, options or versions, which another start would find again."""


class NumericsError(LeZeroError, ArithmeticError):
    """A loss, gradient or comparison left the range where training makes sense."""


class OrderError(LeZeroError, ValueError):
    """A verb or a step was applied in an order that cannot work."""


def need_extra(extra: str, package: str, what: str) -> MissingExtraError:
    """The error for a missing optional package; raise it from the ImportError."""
    return MissingExtraError(
        f"{what} needs the package '{package}', which is not installed. "
        f"Install it with: pip install 'lezero[{extra}]'"
    )
