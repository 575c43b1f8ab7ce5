"""How many connections the system's limits leave room for."""

from __future__ import annotations

import resource
from typing import Any

import psutil
import pytest

from lezero.serve.server.open_files import room_for_connections
from tests.serve.server.running import serving, small_llm


class Limits:
    """Of files: stands in for the system's, since a hard limit never rises again."""

    def __init__(self, soft: int, hard: int) -> None:
        self.now, self.were = (soft, hard), [(soft, hard)]
        self.others = resource.getrlimit

    def get(self, kind: int) -> tuple[int, int]:
        return self.now if kind == resource.RLIMIT_NOFILE else self.others(kind)

    def set(self, kind: int, limits: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        assert self.now[1] in (limits[1], resource.RLIM_INFINITY)
        self.now = limits
        self.were.append(limits)


def limited(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> Limits:
    made = Limits(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", made.get)
    monkeypatch.setattr(resource, "setrlimit", made.set)
    return made


def test_the_soft_limit_rises_as_far_as_it_must_and_comes_back(monkeypatch: Any) -> None:
    for hard in (100_000, resource.RLIM_INFINITY):
        made = limited(monkeypatch, 1024, hard)
        with room_for_connections(1024) as most:
            assert most == 1024
            assert 2 * 1024 < made.now[0] < 10_000
        assert made.now == (1024, hard)
    made = limited(monkeypatch, 65_536, 65_536)
    with room_for_connections(1024) as most:
        assert most == 1024
        assert made.now == (65_536, 65_536)


def test_a_low_hard_limit_leaves_room_for_fewer(monkeypatch: Any) -> None:
    open_now = psutil.Process().num_fds()
    made = limited(monkeypatch, open_now + 100, open_now + 200)
    with room_for_connections(1024) as most:
        assert made.now[0] == open_now + 200
        assert 40 < most < 100
    limited(monkeypatch, 8, 8)
    with room_for_connections(1024) as most:
        assert most == 1


def test_a_server_takes_no_more_connections_than_there_is_room_for(monkeypatch, caplog) -> None:
    open_now = psutil.Process().num_fds()
    limited(monkeypatch, open_now + 200, open_now + 200)
    with serving(small_llm()) as client:
        assert 10 < client.server.config.connections < 100
        assert client.server.app.config.connections == client.server.config.connections
    assert "connections are taken, not 1024" in caplog.text
