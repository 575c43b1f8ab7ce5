"""Bad input ends in one clear message and a proper status, never in a traceback."""

from __future__ import annotations

import importlib
import socket
import time

import pytest

from lezero.cli.main import main
from lezero.elastic.launcher import usable_cores
from lezero.files import list_generations
from tests.train.runs import filled_cache, one_thread, settings, write_config

__all__ = ["filled_cache", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")
HUGE = {"layers": 400, "dim": 16384, "heads": 64}


@pytest.fixture
def fails(capfd):
    """`fails(status, command...)` runs `lz`, checks how it ended and returns the one message."""

    def run(status: int, *command: object) -> str:
        capfd.readouterr()
        assert main([str(word) for word in command]) == status
        _, err = capfd.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("lezero: ")]
        assert "Traceback" not in err
        assert len([line for line in lines if line.startswith("error: ")]) == 1, err
        assert lines[0].startswith("error: "), err
        assert len(lines) <= 4, err
        return " ".join(lines)

    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.lrr=1", "train.lrr: unknown key; did you mean 'lr'?"),
        ("trian.lr=1", "trian: unknown key; did you mean 'train'?"),
        ("model.layer=2", "model.layer: unknown key; did you mean 'layers'?"),
        ("train.steps=many", "train.steps: got 'many', allowed is a valid integer"),
        ("train.steps=1.5", "train.steps: got 1.5"),
        ("train.lr=-1", "train.lr: got -1, allowed is greater than 0"),
        ("train.clip=0", "train.clip: got 0, allowed is greater than 0, or null"),
        ("model.layers=0", "model.layers: got 0, allowed is greater than or equal to 1"),
        ("train.precision=fp8", "train.precision: got 'fp8', allowed is 'auto', 'fp32', 'bf16'"),
        ("train.betas=[1,2,3]", "train.betas"),
        ("train.betas=[0.9,1]", "train.betas.1: got 1, allowed is less than 1"),
        ("data.train=[]", "data.train: got [], allowed is at least 1 item"),
        ("data.tokenizer=letters", "data.tokenizer"),
        ("data=text", "data: got 'text', allowed is a section: keys with values"),
        ("run=''", "run: got '', allowed is at least 1 character"),
        ("nonsense", "write it as section.key=value"),
    ],
)
def test_a_bad_value_names_its_field_and_what_is_allowed(fails, tmp_path, change, message):
    assert message in fails(2, "train", write_config(tmp_path), "--set", change)
    assert not (tmp_path / "run").exists()


def test_a_bad_config_file(fails, tmp_path):
    assert "no such file" in fails(2, "train", tmp_path / "none.yaml")
    assert "is a folder" in fails(2, "train", tmp_path)
    for name, content, message in (
        ("broken.yaml", b"train: [1,\n b: }", "not valid YAML"),
        ("list.yaml", b"- 1", "expected a mapping"),
        ("binary.yaml", b"\xff\xfe\x00", "cannot be read"),
        ("empty.yaml", b"", "data"),
    ):
        (tmp_path / name).write_bytes(content)
        said = fails(2, "train", tmp_path / name)
        assert message in said
        assert name in said
    assert "Missing argument" in fails(2, "train")
    assert "there is no command 'trian'; did you mean 'train'?" in fails(2, "trian")


def test_data_that_is_not_there_or_holds_nothing(fails, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("Größe ".encode("latin-1") * 100)
    for name, status, message in (
        ("/no/such.txt", 1, "/no/such.txt: no such file"),
        (str(tmp_path / "empty.txt"), 2, "empty.txt: empty file"),
        (str(tmp_path / "latin.txt"), 2, "latin.txt: "),
    ):
        path = write_config(tmp_path, data__train=[name])
        assert message in fails(status, "train", path)
    path = write_config(tmp_path, data__tokenizer={"folder": "/no/tokenizer"})
    assert "/no/tokenizer: no such file" in fails(1, "train", path)


def test_models_that_are_not_there_or_cannot_be(fails, tmp_path):
    (tmp_path / "folder").mkdir()
    for model, status, message in (
        ({"folder": "/no/model"}, 1, "/no/model/config.json: no such file"),
        ({"folder": str(tmp_path / "folder")}, 1, "folder/config.json: no such file"),
        ({"layers": 2, "dim": 30, "heads": 4}, 2, "heads: got 4, which does not divide dim 30"),
        ({"folder": "x", "layers": 2}, 2, "folder brings its own shape: remove layers"),
        ({"folder": "x", "layers": 8}, 2, "folder brings its own shape: remove layers"),
    ):
        assert message in fails(status, "train", write_config(tmp_path, model=model))


def test_a_run_folder_that_cannot_be(fails, tmp_path):
    (tmp_path / "file").write_text("")
    said = fails(1, "train", write_config(tmp_path, run=str(tmp_path / "file")))
    assert f"run: {tmp_path}/file is a file; name a folder" in said
    said = fails(1, "train", write_config(tmp_path, run=str(tmp_path / "file/below")))
    assert f"run: {tmp_path}/file/below" in said
    assert "cannot be written" in said


@pytest.mark.usefixtures("without_accelerator")
def test_a_model_too_large_is_told_at_once_with_what_would_fit(fails, tmp_path):
    began = time.monotonic()
    said = fails(1, "train", write_config(tmp_path, model=HUGE))
    assert time.monotonic() - began < 20, "nothing of it was allocated or traced"
    assert "1.29 trillion parameters" in said
    assert "What leaves a quarter of it for activations: model.dim=" in said
    assert "18.76 TiB a rank" in said
    assert "for activations" in fails(1, "plan", write_config(tmp_path, model=HUGE))
    deep = {"layers": 4000, "dim": 512, "heads": 8}
    said = fails(1, "train", write_config(tmp_path, model=deep))
    layers = int(said.partition("model.layers=")[2].partition(",")[0])
    assert 1 <= layers < 4000
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.usefixtures("without_accelerator")
def test_activations_too_large_are_told_with_what_would_fit(fails, tmp_path, monkeypatch):
    """On a machine that has little memory left."""
    module = importlib.import_module("lezero.plan.forecast")
    monkeypatch.setattr(module, "free_bytes", lambda spec: 48 << 20)
    model = {"layers": 1, "dim": 32, "heads": 2}
    said = fails(1, "train", write_config(tmp_path, model=model, train__batch=256))
    assert "this run does not fit: it needs" in said
    assert "48.0 MiB is free for one. What would fit: train.accumulate=" in said
    assert not (tmp_path / "run/checkpoints").exists()


def test_damaged_checkpoints(fails, tmp_path, capfd):
    path = write_config(tmp_path, train__steps=2)
    assert main(["train", str(path)]) == 0
    for generation in list_generations(tmp_path / "run/checkpoints"):
        file = next(generation.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-100])
    capfd.readouterr()
    assert main(["train", str(path)]) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "no good generation among 1" in err
    assert "step-00000002/tensors-00000.safetensors" in err
    capfd.readouterr()
    assert main(["--debug", "train", str(path)]) == 1
    err = capfd.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "error: " in err


def test_what_cannot_be_launched(fails, tmp_path):
    config = write_config(tmp_path)
    job = ("-m", "lezero", "train", config)
    cores = usable_cores()
    said = fails(1, "launch", "-n", cores + 1, *job)
    assert f"{cores + 1} ranks are more than the {cores} usable cores" in said
    assert "--oversubscribe" in said
    assert "ranks: got 0" in fails(2, "launch", "-n", 0, *job)
    assert "no such program" in fails(2, "launch", "-n", 1, "no-such-program")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = fails(1, "launch", "-n", 1, "--port", port, *job)
    assert f"port {port} cannot be used (Address already in use)" in said


def test_a_killed_worker(fails, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n"
    )
    said = fails(137, "launch", "-n", 2, "--oversubscribe", "--max-restarts", 0, script)
    assert "rank 1 was killed by SIGKILL" in said


@pytest.mark.usefixtures("without_accelerator")
def test_errors_of_all_ranks_are_told_once(fails, tmp_path):
    """A batch that two ranks cannot share: each finds out, and no restart is tried."""
    path = write_config(tmp_path, train__batch=7)
    said = fails(2, "launch", "-n", 2, "--oversubscribe", "-m", "lezero", "train", path)
    assert "train.batch: got 7, which 2 rank(s)" in said
    assert "use a multiple of 2" in said
    assert not (tmp_path / "run").exists()
    assert settings(tmp_path)["train"]["batch"] == 8
