"""Every environment variable that LeZero reads, typed, in one table.

`flag("LEZERO_POOL")` is the only way the library looks at its environment, so `lz doctor` and the
documentation can list what is set and what it means.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from lezero.core.errors import ConfigError


@dataclass(frozen=True)
class Flag:
    kind: type
    default: Any
    meaning: str
    allowed: tuple[str, ...] = ()
    """The words that a text may be; any, if none are named."""


FLAGS: dict[str, Flag] = {
    "LEZERO_API_KEYS": Flag(str, "", "hashed API keys for lz serve, with commas between them"),
    "LEZERO_CACHE": Flag(str, "", "folder for measured ceilings and caches (default: the user's)"),
    "LEZERO_DEBUG": Flag(bool, False, "show tracebacks of user errors, as --debug does"),
    "LEZERO_LAUNCH": Flag(str, "", "which launcher started this rank; it sets this itself"),
    "LEZERO_LOG": Flag(
        str, "info", "lowest level that is logged", ("debug", "info", "warning", "error")
    ),
    "LEZERO_POOL": Flag(bool, True, "keep large host blocks between steps (the host memory pool)"),
    "LEZERO_STARTS": Flag(
        int, 0, "how often the launcher started its ranks before; it sets this itself"
    ),
    "LEZERO_WATCH": Flag(bool, True, "several ranks watch each other and name the one that hangs"),
    "TORCHELASTIC_RESTART_COUNT": Flag(
        int, 0, "how often the launcher has started the ranks again; it sets this itself"
    ),
    "TORCHELASTIC_RUN_ID": Flag(str, "", "which launch this is; the launcher sets this itself"),
}

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def flag(name: str) -> Any:
    """The value of one flag of the table; a value of the wrong type is a `ConfigError`."""
    known = FLAGS[name]
    text = os.environ.get(name)
    if text is None or text == "":
        return known.default
    if known.kind is bool:
        lowered = text.strip().lower()
        if lowered in _TRUE or lowered in _FALSE:
            return lowered in _TRUE
        raise ConfigError(f"{name}={text!r}: allowed is 1 or 0 ({known.meaning})")
    if known.kind is int:
        if re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII):
            return int(text)
        raise ConfigError(
            f"{name}={text!r}: allowed is a whole number of at least 0 ({known.meaning})"
        )
    if known.allowed:
        if text.strip().lower() in known.allowed:
            return text.strip().lower()
        raise ConfigError(
            f"{name}={text!r}: allowed is {', '.join(known.allowed)} ({known.meaning})"
        )
    return text
