"""`lz config show` and `lz config schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lezero.cli.config import _as_yaml
from lezero.cli.main import main
from lezero.train import RunConfig

CONFIG = """
run: runs/first
data:
  train: [corpus.txt]
train:
  steps: 20
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_show_prints_every_value_and_marks_those_that_were_set(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", config, "--set", "train.lr=3e-4", "--set", "model.dim=64"]) == 0
    out = capsys.readouterr().out
    marked = {line.split(":")[0].strip() for line in out.splitlines() if line.endswith("# set")}
    assert marked == {"run", "train", "steps", "lr", "dim"}
    shown = yaml.safe_load(out)
    assert shown["train"]["lr"] == 3e-4
    assert shown["train"]["steps"] == 20
    assert shown.keys() == RunConfig.model_fields.keys()


def test_what_show_prints_is_a_config_that_means_the_same(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", config]) == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert RunConfig.load(again) == RunConfig.load(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.stepz=3", "did you mean 'steps'?"),
        ("train.steps=-3", "train.steps: got -3"),
        ("train.steps=many", "train.steps: got 'many'"),
        ("trian.steps=3", "did you mean 'train'?"),
        ("train.lr", "write it as section.key=value"),
        ("run.deeper=3", "'run' is not a section, but 'runs/first'; set all of it"),
        ("run.a.b=3", '--set "run={a: {b: 3}}"'),
        ("model.heads=5", "run.yaml: model.heads: got 5, which does not divide dim 512"),
        ("model.context=8", "run.yaml: data.sequence: got 256, the model reads at most 8"),
    ],
)
def test_a_bad_value_is_one_line_and_status_2(
    config: str, change: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", config, "--set", change]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(tmp_path / "none.yaml")]) == 2
    assert f"error: {tmp_path}/none.yaml: no such file" in capsys.readouterr().err


def test_the_schema_describes_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"].keys() == RunConfig.model_fields.keys()
    assert schema["additionalProperties"] is False
    train = schema["$defs"]["TrainConfig"]["properties"]
    assert "norms, biases" in train["weight_decay"]["description"]


def test_marks_never_change_a_value() -> None:
    values = {"a": "two\nlines", "b": [1, {"c": None}], "d": {}, "e": "x: # y", "f": {"g": 1.5}}
    assert yaml.safe_load(_as_yaml(values, values)) == values
    assert yaml.safe_load(_as_yaml(values, {})) == values
