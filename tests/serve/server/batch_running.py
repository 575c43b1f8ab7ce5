"""A small encoder with a tokenizer, small modules, and a server of either in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lezero.models.bert import Bert, BertConfig
from lezero.serve.batching.plan import Plan
from lezero.serve.server.batched import BatchServer, Served
from lezero.serve.server.config import ServeConfig
from tests.serve.server.running import Client

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "a", "the", "cat", "dog", "sat"]
WORDS += ["on", "mat", "fish", "boat", "sea"]
SHAPE = {"vocab": len(WORDS), "dim": 32, "layers": 2, "heads": 2, "ffn": 64}


def tiny_encoder(folder: Path, context: int = 64, **pooling: bool) -> Path:
    """A folder as sentence-transformers writes it, with random weights."""
    torch.manual_seed(0)
    config = BertConfig(**SHAPE, context=context, types=2, eps=1e-12, approximate="none")
    folder.mkdir(parents=True)
    model = Bert(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    save_file(model.state_dict(), folder / "model.safetensors")
    _write(folder / "config.json", config.to_dict())
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 48})
    names = ["Transformer", "Pooling", "Normalize"]
    places = ["", "1_Pooling", "2_Normalize"]
    stages = [
        {"type": f"sentence_transformers.models.{name}", "path": place}
        for name, place in zip(names, places, strict=True)
    ]
    _write(folder / "modules.json", stages)
    (folder / "1_Pooling").mkdir()
    _write(folder / "1_Pooling" / "config.json", pooling or {"pooling_mode_mean_tokens": True})
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def _write(path: Path, data: object) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


class Net(nn.Module):
    """Rows of 4 numbers to 3; a row that begins with 666 raises, one with 777 gives NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x[:, 0] == 666).any()):
            raise RuntimeError("a row that it does not bear")
        out = self.layers(x)
        return torch.where(x[:, :1] == 777, float("nan"), out)


def factory() -> tuple[nn.Module, torch.Tensor]:
    """What `lz serve --module` imports."""
    return Net(), torch.zeros(2, 4)


@contextlib.contextmanager
def serving_batches(model: Served, plan: Plan | None = None, **changes: Any) -> Iterator[Client]:
    """A server on a free port, which must end by itself when it is stopped. The target is long,
    since a busy machine must not refuse what a test asks."""
    given = {"port": 0, "drain_s": 5.0, "p99_ms": 20_000.0, **changes}
    server = BatchServer(model, ServeConfig(**given), plan=plan)
    ready = threading.Event()
    thread = threading.Thread(target=lambda: server.run(lambda _: ready.set()))
    thread.start()
    assert ready.wait(120), "it did not start"
    try:
        yield Client(server)  # type: ignore[arg-type]
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()
    assert server.batches.runner.active == 0
    assert server.batches.batcher.waiting == 0
