"""Who may ask, and how often: API keys that are kept hashed, and a bucket of tokens for each.

[Note: why one round of SHA-256 is enough] Slow hashes protect secrets that people invent. A key is
256 random bits from `new_key`; nobody guesses one, hashed slowly or not. Every hash is compared in
constant time with that of the key given, and all of them are compared, so time tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from lezero.core.errors import ConfigError, FileError
from lezero.core.flags import flag
from lezero.core.paths import expand_home

_LINE = re.compile(r"([A-Za-z0-9_.@-]{1,64}) sha256:([0-9a-f]{64})")
_LIMIT = 1 << 20
_MOST_CLIENTS = 10_000


def new_key(name: str = "key") -> tuple[str, str]:
    """A key, to be given to a client and kept nowhere, and the line that a key file holds for it.

    Raises `ConfigError` for a name that a line cannot hold.
    """
    key = f"lz-{secrets.token_urlsafe(32)}"
    line = f"{name} sha256:{_digest(key)}"
    if _LINE.fullmatch(line) is None:
        raise ConfigError(
            f"name of the key: got {name!r}, allowed are 1 to 64 letters, digits, '_', '.', '@' "
            "and '-'"
        )
    return key, line


class Keys:
    """The keys that are let in; with none, everyone is.

    lines: as `new_key` makes them; empty ones and those that begin with # are passed over.
    Raises `ConfigError` for other lines, without showing them, since they may hold a key, and for a
    key of two names.
    """

    def __init__(self, lines: list[str], source: str = "keys") -> None:
        self._hashes: list[tuple[str, str]] = []
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            found = _LINE.fullmatch(text)
            if found is None:
                raise ConfigError(
                    f"{source}: line {number} is not of the form 'NAME sha256:HASH', which "
                    "lz serve --new-key NAME prints; keys themselves are not kept"
                )
            self._add(found[1], found[2], f"{source}: line {number}")

    def _add(self, name: str, digest: str, where: str) -> None:
        other = next((known for known, held in self._hashes if held == digest), name)
        if other != name:
            raise ConfigError(
                f"{where} gives the key of '{other}' to '{name}' too, so it would count for one of "
                "them alone; delete a line, or make a key of its own"
            )
        self._hashes.append((name, digest))

    def add(self, others: Keys, source: str) -> None:
        """Lets the keys of `others`, from `source`, in too; `ConfigError` as above."""
        for name, digest in others._hashes:
            self._add(name, digest, source)

    def __len__(self) -> int:
        return len(self._hashes)

    def owner(self, authorization: str) -> str | None:
        """The name of the key in a header "Bearer KEY", or None."""
        kind, _, key = authorization.partition(" ")
        given, found = _digest(key.strip()), None
        for name, known in self._hashes:
            if hmac.compare_digest(given, known):
                found = name
        return found if kind.lower() == "bearer" else None


def read_keys(path: str | None) -> Keys:
    """Keys of a file, and those of LEZERO_API_KEYS (lines between commas)."""
    keys = Keys(str(flag("LEZERO_API_KEYS")).split(","), "LEZERO_API_KEYS")
    if path is not None:
        try:
            where = Path(expand_home(path))
            if not where.is_dir() and not stat.S_ISREG(where.stat().st_mode):
                raise ConfigError(
                    f"{path}: is no regular file, so that its keys could be read only once; write "
                    "them to a file, or set LEZERO_API_KEYS to them, with commas between"
                )
            with where.open("rb") as file:
                data = file.read(_LIMIT + 1)
            if len(data) > _LIMIT:
                raise ConfigError(
                    f"{path}: the file of API keys is longer than {_LIMIT} bytes, which is the "
                    "most; take out keys that are not used"
                )
            own = Keys(data.decode("utf-8-sig").splitlines(), path)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text in UTF-8"
            raise FileError(f"{path}: the API keys cannot be read ({why})") from None
        if not len(own):
            raise ConfigError(
                f"{path}: holds no keys; lz serve --new-key NAME prints a line for it"
            )
        keys.add(own, path)
    return keys


class RateLimit:
    """Lets each client ask `rate` times a minute; unused times add up to a minute's worth.

    A client is a name of keys, so that whoever takes another key has no more, or an address.
    A token bucket for each of those that asked last.
    """

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._each_s = rate / 60
        self._room = float(rate)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str) -> float:
        """Takes one request; 0, or the seconds after which the client may ask again."""
        now = self._clock()
        left, before = self._buckets.pop(client, (self._room, now))
        left = min(self._room, left + (now - before) * self._each_s)
        wait = 0.0 if left >= 1 else (1 - left) / self._each_s
        self._buckets[client] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return wait


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
