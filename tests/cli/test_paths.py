"""`~` is a home folder in every path that a command or a public function takes."""

from __future__ import annotations

import pytest
import torch

import lezero as lz
from lezero.checkpoint.marks import write_mark
from lezero.cli.main import main
from lezero.core.decisions import Decisions
from lezero.core.errors import FileError
from lezero.core.facts import cache_folder
from lezero.data.tokenizer import bytes_tokenizer, load_tokenizer
from lezero.report import Page
from lezero.serve.server import command
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.keys import new_key, read_keys
from lezero.train.metrics import MetricsWriter, read_metrics


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_report_and_why_take_a_run_in_the_home_folder(home, capsys):
    (home / "run").mkdir()
    decisions = Decisions()
    decisions.record("precision", "bf16", reason="faster")
    decisions.write(home / "run" / "decisions.json")
    assert main(["why", "~/run"]) == 0
    assert main(["report", "~/run"]) == 0
    assert "bf16" in capsys.readouterr().out
    assert (home / "run" / "report.html").is_file()


def test_serve_takes_its_files_from_the_home_folder(home, monkeypatch):
    served = []
    monkeypatch.setattr(command, "serve_model", lambda model, config, **_: served.append(model))
    main(["serve", "~/none"])
    assert served == [f"{home}/none"]
    config = ServeConfig(keys="~/keys", record="~/record")
    assert (config.keys, config.record) == (f"{home}/keys", f"{home}/record")
    (home / "keys").write_text(new_key("ada")[1].strip() + "\n")
    assert len(read_keys("~/keys")) == 1


def test_checkpoints_go_to_the_home_folder_and_come_from_there(home):
    saver = lz.checkpoint.Saver("~/run")
    saver.save(1, {"model/w": torch.ones(2)}, {})
    saver.close()
    assert (home / "run" / "step-00000001").is_dir()
    assert lz.checkpoint.load("~/run").step == 1
    write_mark(home / "run", "best", 1)
    assert lz.checkpoint.read_mark("~/run", "best") == 1
    lz.checkpoint.export_weights("~/run", "~/w.safetensors")
    assert (home / "w.safetensors").is_file()


def test_other_public_functions_take_it_too(home):
    MetricsWriter("~/m.jsonl").close()
    assert (home / "m.jsonl").exists()
    bytes_tokenizer().save("~/tokenizer")
    assert load_tokenizer("~/tokenizer").vocab_size == 257
    Page("A page").write("~/page.html")
    assert (home / "page.html").is_file()
    (home / "metrics.jsonl").write_text("")
    assert len(read_metrics("~/metrics.jsonl")) == 0


@pytest.mark.parametrize(
    "call",
    [
        *(lz.checkpoint.load, lz.checkpoint.Saver, lz.load_quantized, lz.models.load_hf),
        *(lz.models.load_gguf, lz.models.load_bert, load_tokenizer, read_metrics, lz.LLM),
    ],
)
def test_an_unknown_user_is_named(call):
    with pytest.raises(FileError, match="there is no user 'no-such-user'"):
        call("~no-such-user/a")


def test_an_unknown_user_is_named_on_the_command_line(monkeypatch, capsys):
    for word in ("why", "report", "generate", "serve", "train"):
        assert main([word, "~no-such-user/a"]) == 1
        assert "error: ~no-such-user/a: there is no user" in capsys.readouterr().err
    monkeypatch.setenv("LEZERO_CACHE", "~no-such-user/a")
    with pytest.raises(FileError, match="there is no user"):
        cache_folder()
