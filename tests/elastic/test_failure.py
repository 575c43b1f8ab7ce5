"""Which failure counts as the first cause, and the words for it."""

from __future__ import annotations

import json

import pytest

from lezero.core.errors import ConfigError, DistributedError, UnlikeError
from lezero.elastic import worker
from lezero.elastic.failure import Failure, explain, first_cause, read_record


def raised(rank: int, when: float, text: str = "lost the others") -> Failure:
    record = {"kind": "exception", "type": "RuntimeError", "text": text, "time": when}
    return Failure(rank, 1, {**record, "own": "frame\n", "full": "all frames\n"})


def test_a_killed_rank_comes_before_those_that_miss_it():
    killed = Failure(2, -9)
    assert first_cause([raised(0, 1.0), raised(1, 0.5), killed]) is killed


def test_the_earliest_error_counts():
    first = raised(3, 0.5, "the cause")
    assert first_cause([raised(0, 1.0), Failure(1, 1), first]) is first


def test_words_and_status():
    assert Failure(0, -9).status == 137
    assert "SIGKILL (kill -9, or" in Failure(0, -9).reason()
    assert Failure(0, 3).status == 3
    assert Failure(0, 3).reason() == "ended with exit status 3"
    assert Failure(0, -63).reason() == "was killed by signal 63"
    assert len(raised(0, 1, "x" * 999).short()) == 200


def test_explanations():
    failure = raised(1, 1.0, "sum")
    text = explain(failure, [], "", shown=False, debug=False)
    assert text.endswith("frame\nerror: rank 1 failed: RuntimeError: sum")
    assert "all frames" in explain(failure, [], "", shown=False, debug=True)
    user = Failure(1, 2, {"kind": "user", "text": "bad key"})
    assert explain(user, ["x"], "", shown=False, debug=False) == "error: bad key"
    shown = explain(Failure(0, 1), [], "; no restart", shown=True, debug=False)
    assert shown.endswith("exit status 1; no restart; its output stands above")


def test_records_of_torch_and_damaged_ones_are_read(tmp_path):
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": "5"}}}))
    assert read_record(str(path))["text"] == "m"
    for text in ("", "{", "[]", '{"message": {}}'):
        path.write_text(text)
        assert read_record(str(path)) == {}
    assert read_record(str(tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("code", "error", "final"),
    [
        (2, None, True),
        (1, None, False),
        (1, ConfigError("train.lr: got -1"), True),
        (1, ImportError("no module"), True),
        (1, DistributedError("rank 1 is gone"), False),
        (1, UnlikeError("'lr' is 1 on rank 0 but 2 on rank 1"), True),
        (1, ValueError("bad sum"), False),
    ],
)
def test_what_another_try_may_heal_is_started_again(tmp_path, monkeypatch, code, error, final):
    """A rank that misses one that died is to be started again, though its error is explained."""
    monkeypatch.setenv(worker.ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.delattr("sys.last_exc", raising=False)
    monkeypatch.setattr("sys.last_value", error, raising=False)
    assert worker._status(code, None) == code
    assert Failure(0, code, read_record(str(tmp_path / "error.json"))).final is final
