"""`lz serve` in a process of its own, and the plainest client: bytes over a socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAME = "served"


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    process: subprocess.Popen[str]
    port: int

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def begin(self, question: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """Sends a question and gives the open connection, which the server closes at the end."""
        made = self.connect()
        made.sendall(post(path, json.dumps(question).encode()))
        return made


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def serving(model: str, weights: str, *words: str) -> Iterator[Served]:
    """Serves `model` at a free port; at the end SIGTERM must end it with status 0."""
    command = [sys.executable, "-m", "lezero", "serve", model, "--weights", weights]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, "--port", "0", "--name", NAME, *words],
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("serving"):
                break
        else:
            raise RuntimeError(f"lz serve ended with status {process.wait()} before it served")
        yield Served(process, int(line.split()[1].rpartition(":")[2]))
        process.send_signal(signal.SIGTERM)
        if process.wait(60):
            raise RuntimeError(f"lz serve ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def tiny(folder: Path, template: str = "") -> str:
    """A small random model with a tokenizer of bytes, as a Hugging Face folder."""
    import torch

    from lezero.data.tokenizer import bytes_tokenizer
    from lezero.models import Transformer, TransformerConfig, save_hf

    tokenizer = bytes_tokenizer()
    tokenizer.save(folder / "tokenizer")
    shape = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 4, "ffn": 256, "context": 1024}
    model = Transformer(TransformerConfig.parse({**shape, "vocab": tokenizer.vocab_size}), seed=3)
    with torch.no_grad():  # large enough for tokens to differ
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(6)
    save_hf(model, folder / "model", folder / "tokenizer")
    path = folder / "model" / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**settings, "chat_template": template or None}))
    return str(folder / "model")
