import json

import pytest
import torch
import yaml

from lezero.cli.main import main
from lezero.train.engine import Engine
from tests.leaks import own_cache


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("LEZERO_CACHE", str(own_cache(tmp_path / "cache")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    document = {
        "run": str(tmp_path / "run"),
        "model": {"layers": 1, "dim": 16, "heads": 2},
        "data": {
            "train": [str(tmp_path / "text.txt")], "validation": 0, "tokenizer": "bytes",
            "sequence": 16,
        },
        "train": {"steps": 9, "batch": 2, "precision": "fp32", "compile": "off", "pool": False},
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    yield path
    torch.set_num_threads(threads)


def test_a_table_and_the_verdict(config, tmp_path, capsys):
    assert main(["verify", str(config), "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["step", "loss", "plain"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert lines[-2] == "Resume: saved after step 1, 2 steps on, bit for bit as uninterrupted."
    assert lines[-1].startswith("Within tolerance: 3 steps in fp32")
    assert not (tmp_path / "run").exists(), "a run that was only verified has no folder"


def test_json_and_set(config, capsys):
    assert main(["verify", str(config), "--set", "train.precision=bf16", "-k", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["steps"], data["precision"]) == (True, 2, "bf16")


def test_a_fault_ends_with_status_1_and_is_in_the_report(config, tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    norm = Engine._gradient_norm
    monkeypatch.setattr(Engine, "_gradient_norm", lambda *given: norm(*given) + 1)
    assert main(["verify", str(config), "--steps", "2", "--set", "train.clip=null"]) == 1
    said = capsys.readouterr()
    assert "parts: step 1, gradient norm: " in said.out
    assert said.err.startswith("error: parts from plain PyTorch at step 1, gradient norm: ")
    assert "Traceback" not in said.err
    data = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert data["ok"] is False
    assert data["first"]["check"] == "gradient norm"

    assert main(["report", str(tmp_path / "run")]) == 0
    assert "gradient norm" in (tmp_path / "run" / "report.html").read_text()


def test_a_folder_that_cannot_be_written_does_not_change_the_verdict(
    config, tmp_path, capsys, caplog
):
    (tmp_path / "run" / "verify.json.tmp").mkdir(parents=True)
    assert main(["verify", str(config), "--steps", "1"]) == 0
    assert "1 step" in capsys.readouterr().out
    assert "verify.json was not written" in caplog.text
    assert not (tmp_path / "run" / "verify.json").exists()


def test_bad_input_is_one_message(config, capsys):
    assert main(["verify", str(config), "--steps", "0"]) == 2
    assert main(["verify", str(config), "--set", "train.stepz=3"]) == 2
    assert main(["verify", str(config.with_name("none.yaml"))]) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("error: ") == 3
    assert "did you mean 'steps'?" in said
