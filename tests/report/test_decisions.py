import io
import json
import os
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError, FileError
from lezero.report.decision_cards import decision_cards
from lezero.report.decisions import pick, read_decisions, shown
from lezero.report.decisions_table import print_decisions


def printed(records, width=100):
    out = io.StringIO()
    print_decisions(records, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def made():
    def fails():
        raise RuntimeError("no compiler here")

    decisions = Decisions()
    decisions.choose(
        "compile", {"eager": lambda: 2.0, "blocks": lambda: 1.0, "step": fails}, why="timed twice"
    )
    decisions.choose("precision", {"bf16": lambda: 1.0}, override="bf16")
    return json.loads(json.dumps(decisions.to_json()))


def test_the_terminal_shows_candidates_figures_and_reason():
    said = printed(pick(made(), None))
    assert "compile: blocks" in said
    assert "timed twice" in said
    assert "no compiler here" in said
    line = next(line for line in said.splitlines() if "eager" in line)
    assert "2.00 s" in line
    assert "2.00x" in line
    assert next(line for line in said.splitlines() if "1.00 s" in line).lstrip().startswith(">")
    assert "asked for" in said
    assert printed([]) == "no decisions are recorded here: nothing was measured to choose from\n"


def test_the_page_shows_the_same():
    root = ElementTree.fromstring(decision_cards(pick(made(), None)))
    said = " ".join(root.itertext())
    for text in ("compile", "blocks", "timed twice", "no compiler here", "2.00 s", "asked for"):
        assert text in said


def test_hostile_records_are_harmless():
    evil = "\x1b[2J<script>[bold]x[/bold]"
    record = {"topic": evil, "chosen": evil, "reason": evil, "unit": evil, "step": -1,
              "candidates": {evil: {evil: 1.0, "failed": evil}, "n": 3, "o": None}}  # fmt: skip
    for item in (record, {}, {"candidates": [1], "topic": 3, "step": "x", "chosen": ["a"]}):
        said = printed([item])
        assert "\x1b" not in said
        ElementTree.fromstring(decision_cards([item]))
    assert "[bold]x[/bold]" in printed([record], 400)
    assert "<script>" not in decision_cards([record])


def test_odd_figures_are_left_out():
    record = {
        "unit": "s",
        "chosen": "a",
        "candidates": {"a": {"s": float("nan")}, "b": {"s": True}},
    }
    assert [c.value for c in shown(record).candidates] == [None, None]


def test_pick_by_name_or_start_of_it():
    data = made()
    assert [r["topic"] for r in pick(data, "COMP")] == ["compile"]
    with pytest.raises(ConfigError, match="did you mean 'precision'"):
        pick(data, "precison")
    with pytest.raises(ConfigError, match="recorded none"):
        pick({"decisions": []}, "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not valid JSON"), ("[]", "no record"), ('{"format": 9, "decisions": []}', "format 9"),
     ('{"decisions": 3, "format": 1}', "no record"), ("\xff", "not valid JSON")],
)  # fmt: skip
def test_damaged_files_are_explained(tmp_path, content, message):
    (tmp_path / "decisions.json").write_text(content, encoding="latin-1")
    with pytest.raises(FileError, match=message):
        read_decisions(tmp_path)


def test_missing_folder_and_file(tmp_path):
    with pytest.raises(FileError, match=r"x: no such run folder$"):
        read_decisions(tmp_path / "x")
    with pytest.raises(FileError, match="cannot be read"):
        read_decisions(tmp_path / ("x" * 300))  # as one that may not be entered
    with pytest.raises(FileError, match=r"there is no decisions\.json in it"):
        read_decisions(tmp_path)
    (tmp_path / "decisions.json").write_text(json.dumps(made()))
    assert read_decisions(tmp_path) == read_decisions(tmp_path / "decisions.json") == made()


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(path := tmp_path / "decisions.json")
        with pytest.raises(FileError, match=r"decisions\.json: not a regular file"):
            read_decisions(tmp_path)
        path.unlink()
