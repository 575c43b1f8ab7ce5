"""What is said of tokens in a tokenizer's folder travels with a saved model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lezero.core.errors import FileError
from lezero.models import Transformer, TransformerConfig, load_hf, save_hf, stop_tokens


def small() -> Transformer:
    return Transformer(TransformerConfig(vocab=60, dim=32, layers=1, heads=4, ffn=48, context=64))


def test_a_tokenizer_travels_with_its_end_token(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    added = {"added_tokens": [{"id": 3, "content": "<end>"}]}
    (source / "tokenizer.json").write_text(json.dumps(added))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    save_hf(small(), tmp_path / "out", tokenizer_folder=source)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert stop_tokens(tmp_path / "out") == (3,)
    assert stop_tokens(source) == ()
    with pytest.raises(FileError, match="holds no tokenizer"):
        save_hf(small(), tmp_path / "out", tokenizer_folder=tmp_path)


def test_what_is_said_beside_a_tokenizer_travels_with_it(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text('{"eos_token_id": [3, 4]}')
    save_hf(small(), tmp_path / "out", tokenizer_folder=source)
    assert stop_tokens(tmp_path / "out") == (3, 4)
    said = {"eos_token_id": [5, 4], "repetition_penalty": 1.05}
    (source / "generation_config.json").write_text(json.dumps(said))
    save_hf(small(), tmp_path / "out", tokenizer_folder=source)
    assert stop_tokens(tmp_path / "out") == (5, 4)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == said


def test_what_config_json_alone_says_travels_too(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    added = {"added_tokens": [{"id": 3, "content": "<end>"}]}
    (source / "tokenizer.json").write_text(json.dumps(added))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    said = {"repetition_penalty": 1.3, "suppress_tokens": [2], "eos_token_id": [5, 3, 4]}
    (source / "config.json").write_text(json.dumps({**said, "hidden_size": 9999}))
    for number in range(2):
        source = save_hf(small(), tmp_path / f"out{number}", tokenizer_folder=source)
        found = json.loads((source / "config.json").read_text())
        assert {name: found[name] for name in said} == said
        assert stop_tokens(source) == (5, 3, 4)
        assert load_hf(source).config == small().config
    (source / "generation_config.json").write_text("{}")  # the other does not count beside it
    save_hf(small(), tmp_path / "last", tokenizer_folder=source)
    assert "repetition_penalty" not in json.loads((tmp_path / "last/config.json").read_text())


def test_names_of_tokens_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    added = {"added_tokens": [{"id": 3, "content": "<end>"}, {"id": 4, "content": ["x"]}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    named = {"eos_token": ["<end>"], "pad_token": {"content": {}}, "bos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    found = json.loads((save_hf(small(), tmp_path / "out", tmp_path) / "config.json").read_text())
    assert found["bos_token_id"] == 3
    assert {found.get("eos_token_id"), found.get("pad_token_id")} == {None}
