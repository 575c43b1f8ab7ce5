"""The folder of a run belongs to one run at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lezero.core.errors import ConfigError, FileError
from lezero.data.tokenizer import bytes_tokenizer
from lezero.jobs.writer import Writer
from lezero.models import Transformer, TransformerConfig
from lezero.serve.coder import Coder
from lezero.train import Callback, Trainer, run_folder
from lezero.train.config import ReportConfig, RunConfig
from lezero.train.run_folder import RunFolder, write_aside
from tests.train.runs import config, filled_cache, one_thread

__all__ = ["filled_cache", "one_thread"]

HOLD = """
import sys
from pathlib import Path
from lezero.train.run_folder import RunFolder
RunFolder(Path(sys.argv[1])).create()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_WAIT_S", 0.3)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    mine = RunFolder(tmp_path / "run")
    try:
        with pytest.raises(FileError, match="run: another run is at work in"):
            mine.create()
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    mine.create()
    again = RunFolder(tmp_path / "run")
    with pytest.raises(FileError, match="another run"):
        again.create()
    mine.release()
    again.create()
    again.release()


def test_a_forked_child_that_lives_on_does_not_keep_the_folder(tmp_path, monkeypatch):
    """As a worker of a loader, or what a callback started, may; nor does it give it away."""
    monkeypatch.setattr(run_folder, "_WAIT_S", 0.3)
    mine, again = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    mine.create()
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        if not (other := os.fork()):
            mine.release()
            os._exit(0)
        os.waitpid(other, 0)
        with pytest.raises(FileError, match="another run"):
            again.create()
        mine.release()
        again.create()
        again.release()
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def test_a_write_that_fails_names_its_path(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_aside(tmp_path / "data.json", "{}")
    assert caught.value.filename == str(tmp_path / "data.json")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A config of no bytes after a power cut is no run's: the run refused its own folder."""
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, real=real: (done.append(n), real(*a)))
    write_aside(tmp_path / "config.yaml", "text")
    assert done == ["fsync", "replace", "fsync"]
    assert (tmp_path / "config.yaml").read_text() == "text"


def test_a_prompt_of_bytes_that_are_no_text():
    writer = Writer.__new__(Writer)
    with pytest.raises(ConfigError, match="prompt: holds bytes that are no UTF-8"):
        next(writer.write("\udcff\udcfe"))


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"^run: .*/file is a file; name a folder"):
        RunFolder(tmp_path / "file").create()
    with pytest.raises(FileError, match=r"^run: .*/file/run cannot be written"):
        RunFolder(tmp_path / "file" / "run").create()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("report.html", "mine"),
        ("metrics.jsonl", "mine"),
        ("config.yaml", "run: x  # as I like it\n"),
        ("config.yaml", "[not yaml"),
        ("config.yaml", "run: x\n"),
        ("tokenizer", ""),
    ],
)
def test_files_of_somebody_else_are_not_written_over(tmp_path, name, text):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text(text)
    with pytest.raises(FileError, match=rf"^run: .*/{name} was not written by a run.*name another"):
        Trainer(config(tmp_path, run=str(folder), train__steps=2)).run()
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, text)]


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_was_killed_as_it_began_begins_again(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    asked = config(tmp_path, run=str(tmp_path / "run"), train__steps=2)
    monkeypatch.setattr(RunFolder, "write_json", killed)
    with pytest.raises(Killed):
        Trainer(asked).run()
    monkeypatch.undo()
    Trainer(asked).run()
    written = tmp_path / "run" / "config.yaml"
    written.write_text(written.read_text() + "# mine\n")
    Trainer(RunConfig.load(written)).run()


@pytest.mark.usefixtures("one_thread")
def test_a_run_stays_in_its_folder_wherever_the_process_goes(tmp_path, monkeypatch, capsys):
    class Moves(Callback):
        def on_step(self, trainer, result):
            os.chdir("/")

    monkeypatch.chdir(tmp_path)
    Trainer(config(tmp_path, run="runs/a", train__steps=2), callbacks=[Moves()]).run()
    monkeypatch.chdir(tmp_path)
    there = {path.name for path in (tmp_path / "runs" / "a").iterdir()}
    assert {"metrics.jsonl", "checkpoints", "report.html", "decisions.json"} <= there
    again = Trainer(config(tmp_path, run="runs/a", train__steps=3))
    again.run()
    assert again.resumed_from == 2
    assert "report: runs/a/report.html" in capsys.readouterr().out


def test_every_prompt_of_the_config_gets_its_sample(tmp_path):
    model = Transformer(TransformerConfig(vocab=257, dim=8, layers=1, heads=1, context=16))
    wanted = ReportConfig(samples=("", "The ", "longer than the model reads"), sample_tokens=3)
    RunFolder(tmp_path).write_samples(model, bytes_tokenizer(), wanted)
    samples = json.loads((tmp_path / "sample.json").read_text())
    assert [sample["prompt"] for sample in samples] == list(wanted.samples)


def test_a_sample_goes_on_from_its_prompt(tmp_path):
    """Many tokenizers drop the space that a text begins with."""

    class Words:
        eos = 0

        def encode(self, text):
            return [ord(letter) for letter in text]

        def decode(self, tokens):
            return "".join(f" {token}" for token in tokens)[1:]

    model = Transformer(TransformerConfig(vocab=257, dim=8, layers=1, heads=1, context=16))
    RunFolder(tmp_path).write_samples(model, Words(), ReportConfig(samples=("a",), sample_tokens=2))
    (sample,) = json.loads((tmp_path / "sample.json").read_text())
    assert len(sample["text"].split()) == 2
    assert sample["text"][0] == " "


def test_dynamic_rope_reaches_beyond_the_context(tmp_path):
    """Samples and `lz generate` then do without a cache of keys."""
    shape = TransformerConfig.parse(
        {
            **{"vocab": 257, "dim": 8, "layers": 1, "heads": 1, "context": 8},
            "rope_scaling": {"kind": "dynamic", "factor": 4.0},
        }
    )
    model = Transformer(shape)
    report = ReportConfig(samples=("The prompt ",), sample_tokens=12)
    RunFolder(tmp_path).write_samples(model, bytes_tokenizer(), report)
    assert len(json.loads((tmp_path / "sample.json").read_text())) == 1
    writer = Writer(model, Coder(bytes_tokenizer(), frozenset()))
    for tokens in (None, 12):
        assert "".join(writer.write("The", tokens)).startswith("The")
    with pytest.raises(ConfigError, match="more than the model's context of 32"):
        next(writer.write("The", 32))


def test_samples_that_cannot_be_made_do_not_end_the_run(tmp_path):
    class Heard(Callback):
        def on_event(self, trainer, text, level):
            told.append((text, level))

    def fails():
        raise ConfigError("the prompt is empty: give at least one token")

    told: list[tuple[str, str]] = []
    trainer = Trainer(config(tmp_path))
    trainer.callbacks = [Heard()]
    trainer._try_to_write("sample.json", fails)
    reason = "the prompt is empty: give at least one token"
    assert told == [(f"sample.json was not written: {reason}", "warning")]


@pytest.mark.parametrize("to", ["loop", "gone"])
def test_a_link_that_leads_nowhere_is_told(tmp_path, to):
    loop = tmp_path / "loop"
    loop.symlink_to(to)
    with pytest.raises(FileError, match=rf"is a link that leads nowhere.*\(to {to}\); remove it"):
        RunFolder(loop).create()
    assert loop.is_symlink()
