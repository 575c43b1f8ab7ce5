"""`lz serve` with an encoder and with a module."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

import lezero
from lezero.cli.main import main
from lezero.data.tokenizer import bytes_tokenizer
from lezero.models import Transformer, TransformerConfig, save_hf
from tests.serve.server.batch_running import tiny_encoder
from tests.serve.server.running import head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.mark.parametrize("which", ["encoder", "module"])
def test_the_command_serves_and_ends_with_status_0(which: str, folder: Path) -> None:
    words = ["serve", "--port", "0", "--p99-ms", "20000"]
    words += [str(folder)] if which == "encoder" else []
    words += ["--module", "tests.serve.server.batch_running:factory"] if which == "module" else []
    process = subprocess.Popen(
        [sys.executable, "-m", "lezero", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        lines = []
        while not lines or not lines[-1].startswith("serving"):
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended before it served"
        url = re.findall(r"http://\S+:\d+", lines[-1])[0]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
            if which == "encoder":
                assert len(made.embeddings.create(model="tiny", input="hello").data) == 1
            else:
                body = {"inputs": [[0, 0, 0, 0]]}
                assert "output" in made.post("/infer", body=body, cast_to=dict[str, Any])["outputs"]
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.wait(30) == 0
    told = "".join(lines)
    assert re.search(r"forecast .* usual requests a second of the model alone, HTTP aside", told)
    assert "batching" in told
    measured = re.search(
        r"weights +(fp32|bf16|int8): the fastest measured \(fp32 [\d.]+ ms; ", told
    )
    assert (measured is not None) == ("weights" in told) == (which == "encoder")
    assert "1 requests, 1 items" in rest
    assert "99% of the last within" in rest


_HANGS = """
import time, torch
from lezero.serve.server import host
host._LAST_STEP_S = 0.5
class Hangs(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 10_000:
            print("hangs", flush=True)
            time.sleep(600)
        return x
def factory():
    return Hangs(), (torch.zeros(2),)
if __name__ == "__main__":
    from lezero.cli.main import main
    words = ["serve", "--port", "0", "--drain", "0.1", "--module", "hangs:factory"]
    raise SystemExit(main(words))
"""


def test_a_step_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(_HANGS)
    place = os.pathsep.join([str(tmp_path), str(Path(lezero.__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "hangs.py")],
        env={**os.environ, "PYTHONPATH": place},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = ""
        while not line.startswith("serving"):
            line = process.stdout.readline()
            assert line, "it ended before it served"
        port = int(re.findall(r"http://\S+?:(\d+)", line)[0])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as asking:
            body = b'{"inputs": [20000, 0]}'
            asking.sendall(head("/v1/infer", len(body)) + body)
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(signal.SIGTERM)
            _, told = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert re.search(r"a step runs for \d+ s and does not end", told)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--module", "x"], "PACKAGE.MODULE:FUNCTION"),
        (["--module", "a.b:c", "--context", "5"], "--context: got 5, which has no meaning for"),
        (["--module", "a.b:c", "x"], "error: model: got x, which has no meaning for --module"),
        (["FOLDER", "--speculate", "lookup"], "--speculate: got lookup"),
        (["FOLDER", "--weights", "int4"], "--weights: got 'int4'"),
        (["FOLDER", "--batch", "0"], "--batch: got 0"),
        (["FOLDER", "--delay-ms", "-1"], "--delay-ms: got -1"),
        (["FOLDER", "--delay-ms", "50"], "--delay-ms: got 50, allowed is 0 to less than the 50 of"),
        (["--module", "a:b", "--delay-ms", "9", "--p99-ms", "8"], "less than the 8 of --p99-ms"),
        (["FOLDER", "--p99-ms", "0"], "--p99-ms: got 0"),
        (["FOLDER", "--host", "0.0.0.0"], "--host: got 0.0.0.0"),
        (["FOLDER", "--host", "0.0.0.0"], "--public-without-keys"),
        (["FOLDER", "--drain", "-1"], "error: --drain: got -1.0"),
        (["FOLDER", "--queue", "-1", "--drain", "-1"], "equal to 0; --drain: got"),
        (["FOLDER", "--allow-host", "*"], "--allow-host: got '*'"),
        (["MODEL", "--batch", "3"], "--batch: got 3, which has no meaning for a language model"),
        (["MODEL", "--p99-ms", "50"], "--p99-ms: got 50.0, which has no meaning"),
        (["MODEL", "--max-requests", "0"], "--max-requests: got 0"),
    ],
)
def test_the_command_refuses(words, message, folder, tmp_path, capsys) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    given = [{"FOLDER": str(folder), "MODEL": str(model)}.get(word, word) for word in words]
    assert main(["serve", *given, "--port", "0"]) == 2
    assert message in capsys.readouterr().err


def test_fields_of_a_model_s_file_are_not_called_flags(tmp_path, capsys) -> None:
    save_hf(Transformer(TransformerConfig(vocab=257, dim=32, layers=1, heads=2)), tmp_path)
    bytes_tokenizer().save(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    about |= {"num_hidden_layers": 0, "max_position_embeddings": 0}
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "config.json: layers: got 0" in said
    assert "; context: got 0" in said


@pytest.mark.parametrize(("name", "said"), [("none", "no such file or folder"), ("", "no model")])
def test_options_are_not_blamed_for_a_model_that_is_not_there(name, said, tmp_path, capsys) -> None:
    words = [str(tmp_path / name), "--batch", "4", "--p99-ms", "50", "--port", "0"]
    assert main(["serve", *words]) == 1
    assert said in capsys.readouterr().err
