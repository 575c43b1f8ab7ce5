"""A run's checkpoint, opened as a model that is whole."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import lezero as lz
from lezero import checkpoint
from lezero.core.errors import FileError
from lezero.data.tokenizer import bytes_tokenizer
from lezero.hub.foreign import is_foreign
from lezero.hub.opened import open_model
from lezero.hub.weights import read_weights
from lezero.models.hf_writing import save_hf
from lezero.models.huggingface import load_hf, read_config
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.models import small


def test_a_run_opens_whole_and_answers(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer()
    model = small(vocab=tokenizer.vocab_size)
    engine = lz.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    engine.save(tmp_path, model=model.config.to_dict())
    tokenizer.save(tmp_path / "tokenizer")
    with mock.patch.object(checkpoint, "load", wraps=checkpoint.load) as load:
        opened, folder = open_model(str(tmp_path), torch.float32)
    assert not load.call_args.kwargs["select"]("optimizer/embed.weight/exp_avg")
    assert folder == tmp_path / "tokenizer"
    tensors = [*opened.parameters(), *opened.buffers()]
    assert not any(tensor.is_meta for tensor in tensors)
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(opened(tokens), model(tokens))
    params = SamplingParams(temperature=0, max_tokens=5)
    right = LLM(small(vocab=tokenizer.vocab_size), weights="fp32").generate([5, 6, 7], params)
    assert LLM(tmp_path, weights="fp32").generate([5, 6, 7], params)[0].tokens == right[0].tokens


def test_a_generation_opens_by_a_name_from_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = bytes_tokenizer()
    model = small(vocab=tokenizer.vocab_size)
    engine = lz.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    made = engine.save(tmp_path / "checkpoints", model=model.config.to_dict())
    tokenizer.save(tmp_path / "tokenizer")
    for folder, name in ((made.parent, made.name), (made, "."), (made.parent, "."), (made, "..")):
        monkeypatch.chdir(folder)
        assert open_model(name)[1] == tmp_path / "tokenizer"


def test_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_hf(small(), "~/models/a")
    opened, folder = open_model("~/models/a")
    assert folder == tmp_path / "models" / "a"
    assert opened.config == load_hf("~/models/a").config == read_config("~/models/a")
    assert not is_foreign("~/models/a")
    save_file({"weight": torch.ones(2)}, tmp_path / "w.safetensors")
    assert read_weights("~/w.safetensors")["weight"].tolist() == [1, 1]
    with pytest.raises(FileError, match=f"{tmp_path}/none: no such file or folder"):
        open_model("~/none")
