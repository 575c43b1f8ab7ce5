"""What is concluded of a rank on another machine from what was heard of it, second by second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lezero.comm import judge
from lezero.comm.board import Address
from lezero.comm.calls import NOTHING, Call, History, Window
from lezero.comm.judge import BEAT_S, MISSED_S, Judge

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

    def hear(
        self,
        entered: int = 4,
        left: int = 4,
        state: str = "runs",
        since_s: float = 0.0,
        window: Window = NOTHING,
    ) -> None:
        doing = "compiles" if state == "busy" else ""
        message = {"at": [entered, left], "state": [state, doing, since_s], "place": "train.py:3"}
        self.judge.heard(self.judge.peers[1], {**message, "window": window.to_json()}, self.now)

    def told(
        self,
        seconds: float,
        *,
        heard: bool = False,
        surely: bool = False,
        at: tuple[int, int] = (5, 4),
    ) -> str:
        """The first verdict within `seconds`, or nothing; rank 0 has entered and left `at`."""
        until = self.now + seconds
        while self.now < until:
            self.now += BEAT_S
            if heard:
                self.hear()
            text = self.judge.look(self.now, *at, surely)
            if text:
                return text
        return ""


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(judge.log, "warning", lambda text, *words: said.append(text % words))
    return said


def test_what_a_rank_told_before_is_known_still() -> None:
    scene, theirs = Scene(), History()
    for number in range(1, 101):
        theirs.add(Call("all_reduce", (4,), "float32", f"p{number}"))
    for last in (40, 100, 60):  # the last one answers a question
        scene.hear(window=theirs.window(last))
    peer = scene.judge.peers[1]
    for number in (40, 100, 60):
        assert peer.call(number) == theirs.call(number)
    assert peer.window == theirs.window()


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
    assert len(warnings) == 1


def test_a_rank_that_answers_again_is_told_of_again_when_it_is_silent_again(
    warnings: list[str],
) -> None:
    scene = Scene()
    for times in (1, 2):
        assert not scene.told(1.0, heard=True)
        assert not scene.told(5.0)
        assert len(warnings) == times


@pytest.mark.parametrize(
    ("state", "level", "text"),
    [
        ("runs", "warning", "waiting since 30 s for rank 1, which is at train.py:3"),
        ("busy", "info", "waiting since 30 s for rank 1, which compiles since 42 s"),
    ],
)
def test_who_is_waited_for_is_told_of_once_with_what_it_does(
    monkeypatch: pytest.MonkeyPatch, state: str, level: str, text: str
) -> None:
    said: list[str] = []
    for name in ("info", "warning"):
        monkeypatch.setattr(
            judge.log, name, lambda form, *words, name=name: said.append(f"{name}: {form % words}")
        )
    scene = Scene()
    while scene.now < 3 * PATIENCE_S:
        scene.hear(state=state, since_s=scene.now + 12)
        assert not scene.told(BEAT_S)
    assert len(said) == 1
    assert said[0].startswith(f"{level}: {text}")


def test_a_rank_that_began_the_same_collective_may_wait_elsewhere(warnings: list[str]) -> None:
    """In a collective that the watch does not see, before it has come to the end of this one."""
    scene = Scene()
    while scene.now < 2 * PATIENCE_S:
        scene.hear(entered=6, left=4)
        assert not scene.told(BEAT_S)
    assert len(warnings) == 1


def test_waiting_begins_anew_with_every_collective(warnings: list[str]) -> None:
    scene = Scene()
    for at in ((4, 4), (5, 4), (6, 5), (7, 6)):  # alone, then with one in flight all the time
        assert not scene.told(0.9 * PATIENCE_S, heard=True, at=at)
    assert not warnings


def test_a_rank_that_is_gone_and_not_waited_for_may_just_be_ahead_at_the_end() -> None:
    scene = Scene()
    scene.hear()
    scene.board.gone = {1}
    assert not scene.told(MISSED_S + 5.0, at=(4, 4))
    assert "rank 1 is gone" in scene.told(1.0, at=(4, 4))


def test_a_process_that_stood_still_itself_blames_nobody_for_it(warnings: list[str]) -> None:
    scene = Scene()
    assert not scene.told(5.0, heard=True)
    scene.now += 2 * PATIENCE_S
    assert not scene.told(MISSED_S)
    assert not any("does not answer" in text for text in warnings)
    assert "rank 1 does not answer since 30.5 s" in scene.told(PATIENCE_S)


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


@pytest.mark.parametrize(("entered", "left"), [(4, 4), (5, 4), (5, 5)])
def test_a_rank_that_failed_once_it_was_done_with_a_collective_does_not_hold_it_up(
    entered: int, left: int
) -> None:
    scene = Scene()
    scene.hear(entered, left, "failed")
    assert ("rank 1 failed" in scene.told(1.5)) == (left == 4)
