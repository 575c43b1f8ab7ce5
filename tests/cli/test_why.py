import json

import pytest

from lezero.cli.main import main

DOCUMENT = {
    "format": 1,
    "decisions": [
        {"topic": "precision", "chosen": "bf16", "unit": "s", "reason": "native bf16",
         "candidates": {"fp32": {"s": 1.5}, "bf16": {"s": 0.75}},
         "overridden": False, "replayed": True, "step": 0},
        {"topic": "compile", "chosen": "eager", "unit": "s", "reason": "asked for",
         "candidates": {}, "overridden": True, "replayed": False, "step": 0},
    ],
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "decisions.json").write_text(json.dumps(DOCUMENT))
    return str(tmp_path)


def test_every_decision_with_figures_and_reason(run, capsys):
    assert main(["why", run]) == 0
    said = capsys.readouterr().out
    for text in ("precision: bf16", "native bf16", "1.50 s", "0.75 s", "2.00x", "compile: eager",
                 "asked for", "kept from before a resume"):  # fmt: skip
        assert text in said


def test_a_narrow_terminal_has_what_is_said_below_its_row(tmp_path, capsys, monkeypatch):
    failed = "not tried: the run takes about 2 s, too short to earn compilation back"
    decision = {**DOCUMENT["decisions"][0], "topic": "compile", "chosen": "eager"}
    decision["candidates"] = {"eager": {"s": 1.5}, "blocks": {"s": None, "failed": failed}}
    document = {"format": 1, "decisions": [decision]}
    (tmp_path / "decisions.json").write_text(json.dumps(document))
    for columns in ("40", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["why", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= int(columns) and line == line.rstrip() for line in lines)
        (at,) = [i for i, line in enumerate(lines) if "not tried" in line]
        below = lines[at - 1].split() == ["blocks"]
        assert below is (columns == "40")
    assert len(lines) < 8


def test_one_topic(run, capsys):
    assert main(["why", run, "prec"]) == 0
    assert "compile" not in capsys.readouterr().out


def test_json(run, capsys):
    assert main(["why", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == DOCUMENT
    assert main(["why", run, "compile", "--json"]) == 0
    assert [d["topic"] for d in json.loads(capsys.readouterr().out)["decisions"]] == ["compile"]


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [(None, 1, "there is no decisions.json in it"), ("{", 1, "not valid JSON"),
     ('{"format": 7, "decisions": []}', 1, "reads format 1")],
)  # fmt: skip
def test_bad_folders_end_in_one_message(tmp_path, capsys, content, status, message):
    if content is not None:
        (tmp_path / "decisions.json").write_text(content)
    assert main(["why", str(tmp_path)]) == status
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_unknown_topic_and_folder(run, capsys):
    assert main(["why", run, "precisoin"]) == 2
    assert "did you mean 'precision'?" in capsys.readouterr().err
    assert main(["why", run + "/nope"]) == 1
    assert "no such run folder" in capsys.readouterr().err


def test_report_writes_and_names_the_page(run, tmp_path, capsys):
    assert main(["report", run]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").exists()
    assert main(["report", run + "/nope"]) == 1
    assert "no such run folder" in capsys.readouterr().err
