"""Where a server listens, and what it lets clients do."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lezero.core.config import Config, PathText
from lezero.core.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]")


def _bare(name: str) -> str:
    if not _BARE.fullmatch(name):
        said = "a bare name, as clients write it between https:// and the port or path"
        raise PydanticCustomError("host_name", said)
    return name


HostName = Annotated[str, AfterValidator(_bare)]


class ServeConfig(Config):
    """Address and limits of a server."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is reached from this machine alone."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one."""
    name: str = Field(default="", max_length=200)
    """The model's name for clients; by default the last part of its path."""
    keys: PathText | None = None
    """File of API keys, hashed; see `lz serve --new-key`. LEZERO_API_KEYS adds to it."""
    public_without_keys: bool = False
    """Whether others on the network may ask without a key."""
    record: PathText | None = None
    """Folder for decisions.json; by default one of the cache folder, for each model."""
    allow_hosts: tuple[HostName, ...] = ()
    """Names, besides those of this machine, that a server on loopback answers to: those that a
    proxy on the same machine passes on from its clients."""
    queue: int = Field(default=64, ge=0)
    """Requests that may wait besides those that run; more are told to come again (429)."""
    p99_ms: float = Field(default=50.0, gt=0, le=600_000)
    """Milliseconds in which 99% of the requests are to be answered, by models that are batched."""
    rate: int | None = Field(default=None, ge=1)
    """HTTP requests a minute with keys of one name, or of one address where there are no keys."""
    connections: int = Field(default=1024, ge=1)
    """Open connections at most."""
    body_bytes: int = Field(default=1 << 20, ge=1024)
    """Length of a request's body at most."""
    answers_bytes: int = Field(default=1 << 29, ge=1024)
    """Bytes of all answers, and parts of streams, that are made or wait for their clients to read
    them; beyond it requests are told to come again (503). One answer of any size is made alone, but
    for log-probabilities, with which an answer ends there. As many bytes of bodies may be on their
    way, counted apart; beyond it those of more than 64 KiB are refused so."""
    read_s: float = Field(default=20.0, gt=0)
    """Seconds in which a client must have sent its headers, and then its body."""
    write_s: float = Field(default=30.0, gt=0)
    """Seconds that a client may leave an answer unread before it is cut off."""
    request_s: float = Field(default=600.0, gt=0)
    """Seconds that a request may take, waiting included."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that running requests have left after SIGTERM, Ctrl-C or SIGHUP."""

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def refuse_if_open(self, has_keys: bool) -> None:
        """Raises `ConfigError` where anyone on the network could use the model."""
        if not (self.loopback or has_keys or self.public_without_keys):
            raise ConfigError(
                f"host: got {self.host}, which others on the network reach, and there are no API "
                "keys; make one (lz serve --new-key NAME) and give --keys FILE, or listen on "
                "127.0.0.1, or let anyone ask with --public-without-keys"
            )
