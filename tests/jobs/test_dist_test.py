"""`lz dist-test`: right on real ranks, wrong where a wire is broken, one message for bad input."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import torch

from lezero.cli.main import main
from lezero.comm import Mesh, Wire
from lezero.comm.block_codec import BlockCodec
from lezero.comm.coded import Coded
from lezero.comm.flat import Flat, chunks
from lezero.core import groups
from lezero.elastic.launcher import usable_cores
from lezero.jobs import dist_test
from lezero.jobs.dist_test_view import text
from lezero.jobs.wire_checks import check, wires
from tests.ranks import RankPool

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_two_ranks_from_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--np", "2", "--model", "tiny", "--json", "--oversubscribe"]
    assert main(["dist-test", *words]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["right"], err
    assert found["hosts"] == [[0, 1]]
    assert {level["name"] for level in found["levels"]} == {"memory", "loopback"}
    kinds = {(one["topology"], one["name"]) for one in found["checks"]}
    assert {
        ("flat", "int4"),
        ("flat", "bf16"),
        ("flat", "gather int8"),
        ("shared", "as they are"),
    } <= kinds
    assert all(one["compared"] > 0 and not one["wrong"] for one in found["checks"])
    assert all(row["seconds"] > 0 and row["predicted_s"] > 0 for row in found["timed"])
    assert found["auto"]["parameters"] > 900_000
    assert found["auto"]["chosen"] == "none"


def several(hosts: list[list[int]]) -> list[dict[str, Any]]:
    """The checks of the hierarchical topology on hosts that are said, not found."""
    with pytest.MonkeyPatch.context() as patch:
        from lezero.comm import routing
        from lezero.comm.topology import Hosts

        patch.setattr(routing, "find_hosts", lambda group: Hosts(tuple(map(tuple, hosts))))
        with Mesh({"ranks": 4}) as mesh:
            made = [check(mesh, "ranks", name, wire) for name, wire in wires(("hierarchical",))]
        return [{"name": one.name, "wrong": one.wrong, "compared": one.compared} for one in made]


def test_the_hierarchical_topology_is_checked_too(ranks: RankPool) -> None:
    found = ranks(4, several, [[0, 1], [2, 3]])[0]
    assert {"as they are", "int4", "gather int8"} <= {one["name"] for one in found}
    for one in found:
        assert not one["wrong"], one
        assert one["compared"] > 0


def broken(what: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        wire = Wire(topology="flat")
        if what == "sum":
            patch.setattr(Flat, "_add_up", _drops_a_rank)
        else:
            wire = Wire(codec="int4", feedback="both", topology="flat")
            decode = BlockCodec.decode
            patch.setattr(
                BlockCodec,
                "decode",
                lambda self, payload, out, add=False: (
                    decode(self, payload, out, add),
                    out.mul_(1.5),
                )[0],
            )
        with Mesh({"ranks": 2}) as mesh:
            return check(mesh, "ranks", what, wire).wrong


def _drops_a_rank(self: Flat, flat: torch.Tensor, out: torch.Tensor, what: str) -> Any:
    received = torch.empty_like(flat)
    yield self._exchange(flat, received, 0, what)
    out.copy_(received.view(self._size, -1)[0])


@pytest.mark.parametrize("what", ["sum", "codec"])
def test_a_broken_wire_is_told(ranks: RankPool, what: str) -> None:
    one, two = ranks(2, broken, what)
    assert one == two
    assert any("reduce_scatter float32, 333 elements" in text for text in one)
    assert "allowed difference" in one[0]


def broken_all_reduce(codec: str, what: str) -> list[str]:
    """Only the coded all-reduce is wrong, and on all ranks alike, so that their bits agree."""
    reduce, spread = Coded._reduce, Coded._spread

    def changed(self: Any, codec: Any, flat: Any, out: Any, key: Any, spans: Any, name: str) -> Any:
        yield from reduce(self, codec, flat, out, key, spans, name)
        if name == "all_reduce" and what != "zeros":
            out.add_(chunks(flat, self._size)[self._rank], alpha={"drop": -1, "double": 1}[what])

    def empty(self: Any, codec: Any, sent: Any, out: Any, lane: int, name: str) -> Any:
        yield from spread(self, codec, sent, out, lane, name)
        if name == "all_reduce" and what == "zeros":
            out.zero_()

    with pytest.MonkeyPatch.context() as patch, Mesh({"ranks": 2}) as mesh:
        patch.setattr(Coded, "_reduce", changed)
        patch.setattr(Coded, "_spread", empty)
        return check(mesh, "ranks", what, Wire(codec=codec, feedback="both", topology="flat")).wrong


@pytest.mark.parametrize("what", ["drop", "double", "zeros"])
@pytest.mark.parametrize("codec", ["int8", "topk:0.01"])
def test_a_broken_coded_all_reduce_is_told(ranks: RankPool, codec: str, what: str) -> None:
    told = ranks(2, broken_all_reduce, codec, what)[0]
    assert all("all_reduce" in text for text in told)
    for chunk in ("float32, 1 elements", "bfloat16, 333 elements", "float32, 70001 elements"):
        assert any(chunk in text for text in told), told


def broken_gather(what: str) -> list[str]:
    """Parameters come wrong from a gather: on all ranks alike, or by a rounding on one."""
    decode = BlockCodec.decode

    def wrong(self: Any, payload: Any, out: torch.Tensor, add: bool = False) -> None:
        decode(self, payload, out, add)
        if what == "off":
            out.mul_(1.5)
        elif what == "nan":
            out[:1] = torch.nan
        elif groups.rank():
            out.mul_(1 + 2**-8)

    with pytest.MonkeyPatch.context() as patch, Mesh({"ranks": 2}) as mesh:
        patch.setattr(BlockCodec, "decode", wrong)
        return check(mesh, "ranks", what, Wire(gather="int8", topology="flat")).wrong


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("off", "allowed difference"),
        ("nan", "is nan, not"),
        ("one rank", "ranks end with different bits"),
    ],
)
def test_a_broken_gather_is_told(ranks: RankPool, what: str, reason: str) -> None:
    told = ranks(2, broken_gather, what)[0]
    assert any("all_gather float32, 333 elements" in text and reason in text for text in told)


def measured() -> list[Any]:
    report = dist_test.measure(26_000_000)
    shown = text(report)
    report.checks[0].wrong.append("rank 1: all_reduce: element 0 is 1, not 2")
    return [report.right, shown, text(report)]


def test_the_report_for_people(ranks: RankPool) -> None:
    right, shown, wrong = ranks(2, measured)[0]
    assert not right
    assert "All collectives are right." in shown
    assert "Codec auto, 26 M parameters" in shown
    assert "wrong: flat, as they are, rank 1: all_reduce" in wrong
    assert "Some collectives are wrong." in wrong


def test_one_rank_says_that_it_tests_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["dist-test", "--np", "1"]) == 0
    told = "1 rank: it has nobody to exchange with, so nothing was tested. Give --np 2 or more.\n"
    assert capfd.readouterr().out == told


def test_a_wrong_result_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = dist_test.measure(0)
    report.checks.append(dist_test.Check("int4", "flat", 1, ["rank 0: off"]))
    monkeypatch.setattr(dist_test, "measure", lambda parameters: report)
    assert main(["dist-test", "--np", "1"]) == 1
    assert main(["dist-test", "--np", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["right"] is False


@pytest.mark.parametrize("model", ["26m", "26.4m", "1.3b", "7"])
def test_a_model_is_a_preset_or_a_number(model: str) -> None:
    wanted = {"26.4m": 26_400_000, "1.3b": 1_300_000_000, "7": 7}
    assert dist_test.count_parameters(model) == wanted.get(model, 25_960_960)


def message(capfd: pytest.CaptureFixture[str], status: int, *words: str) -> str:
    assert main(["dist-test", *words]) == status
    lines = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1, lines
    return lines[0]


def test_bad_input_is_one_message(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is a preset (tiny" in message(capfd, 2, "--model", "llama")
    assert "is a preset (tiny" in message(capfd, 2, "--model", "infb")
    assert "more than the" in message(capfd, 1, "--np", str(usable_cores() + 1))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port}" in message(capfd, 1, "--np", "2", "--port", port, "--oversubscribe")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    found = message(capfd, 1, "--np", "2", "--oversubscribe")
    assert "no network interface 'nosuch0'" in found
