"""What is concluded of a rank on another machine from what was heard of it, second by second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lezero.comm import judge
from lezero.comm.board import Address
from lezero.comm.calls import NOTHING, History
from lezero.comm.judge import BEAT_S, Judge

PATIENCE_S = 30.0


class Scene:
    """Rank 0 waits in a collective for rank 1, a process of another machine."""

    def __init__(self) -> None:
        addresses = [Address(f"10.0.0.{n}", 5000, f"machine {n}", 77, "") for n in (1, 2)]
        self.board = SimpleNamespace(
            rank=0, world=2, gone=set(), addresses=addresses, near=lambda rank: False
        )
        board: Any = self.board
        self.judge, self.now = Judge(board, History(), 0.0, PATIENCE_S), 0.0

    def hear(self, entered: int = 4, left: int = 4, state: str = "runs") -> None:
        message = {"at": [entered, left], "state": [state, "", 0.0], "place": "train.py:3"}
        self.judge.heard(self.judge.peers[1], {**message, "window": NOTHING.to_json()}, self.now)

    def told(self, seconds: float, *, heard: bool = False, surely: bool = False) -> str:
        """The first verdict within `seconds`, or nothing."""
        until = self.now + seconds
        while self.now < until:
            self.now += BEAT_S
            if heard:
                self.hear()
            text = self.judge.look(self.now, 5, 4, surely)
            if text:
                return text
        return ""


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(judge.log, "warning", lambda text, *words: said.append(text % words))
    return said


@pytest.mark.parametrize("refused", [False, True])
def test_a_rank_that_was_never_heard_is_told_of_once_and_not_judged(
    warnings: list[str], refused: bool
) -> None:
    scene = Scene()
    scene.board.gone = {1} if refused else set()
    assert not scene.told(2 * PATIENCE_S)
    assert not scene.told(1.0, surely=True)
    assert len(warnings) == 1
    assert "rank 1 cannot be heard: datagrams (UDP)" in warnings[0]


def test_a_rank_that_was_heard_and_then_is_silent_is_named(warnings: list[str]) -> None:
    scene = Scene()
    assert not scene.told(20.0, heard=True)
    assert not warnings
    assert not scene.told(PATIENCE_S)
    assert "rank 1 does not answer since 2.5 s" in warnings[0]
    assert "rank 1 does not answer since 30.5 s" in scene.told(1.0)


def test_a_port_that_refuses_means_the_end_of_a_rank_once_it_is_silent(
    warnings: list[str],
) -> None:
    scene = Scene()
    scene.board.gone = {1}  # a firewall here answers for it
    assert not scene.told(20.0, heard=True)
    assert "rank 1 is gone: its process 77" in scene.told(3.0)
    scene = Scene()
    scene.hear()
    scene.board.gone = {1}
    assert "rank 1 is gone: its process 77" in scene.told(0.5, surely=True)
    assert not warnings


@pytest.mark.parametrize(("entered", "left"), [(4, 4), (5, 4), (5, 5)])
def test_a_rank_that_left_with_a_collective_under_way_finished_early(
    entered: int, left: int
) -> None:
    scene = Scene()
    scene.hear(entered, left, "finished")
    early = "rank 1 has finished early, after"
    assert (early in scene.told(2.0)) == (entered == 4)
    assert (early in scene.told(0.5, surely=True)) == (left == 4)
