"""The end of a text where only the model's files name it, and files that say nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lezero.core.errors import FileError
from lezero.data.special import stop_tokens
from lezero.data.tokenizer import load_tokenizer, train_tokenizer


def unnamed(folder: Path) -> Path:
    """A tokenizer whose files say of no token that it ends a text."""
    train_tokenizer(["a few words, a few more words"] * 9, 300).save(folder)
    (folder / "special_tokens_map.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 99}')
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<odd>"))
    return folder


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ends", [7, [7, 3], [10**12, 7]])
def test_the_model_beside_a_tokenizer_names_its_end(tmp_path, name, ends):
    folder = unnamed(tmp_path / "model")
    with pytest.raises(FileError, match="names no end-of-text token"):
        load_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    (folder / name).write_text(json.dumps({"eos_token_id": ends}))
    found = load_tokenizer(folder)
    assert found.eos == 7
    found.save(tmp_path / "alone")
    again = load_tokenizer(tmp_path / "alone")
    assert (again.eos, again.digest) == (7, found.digest)
    assert json.loads((tmp_path / "alone" / "tokenizer_config.json").read_text())[
        "model_max_length"
    ]


def test_an_end_that_the_tokenizer_names_itself_counts(tmp_path):
    train_tokenizer(["a few words, a few more words"] * 9, 300).save(tmp_path)
    own = load_tokenizer(tmp_path).eos
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": own + 1}))
    assert load_tokenizer(tmp_path).eos == own


def test_a_token_with_the_usual_name_ends_texts_only_where_nothing_names_an_end(tmp_path):
    folder = unnamed(tmp_path)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<odd>", "<|endoftext|>"))
    usual = load_tokenizer(folder)
    assert usual.decode([usual.eos]) == "" != usual.decode([65])
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(folder).eos == 7 != usual.eos


@pytest.mark.parametrize("ends", ["7", True, 1.5, [7, None], {"a": 1}, ["x" * 10**6]])
def test_ends_that_are_no_tokens_are_refused(tmp_path, ends):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(FileError, match=r"generation_config\.json: eos_token_id: got .* allowed"):
        stop_tokens(tmp_path)


def test_ends_that_are_none(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert stop_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": [-1, 5]}')
    assert stop_tokens(tmp_path) == (5,)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(FileError, match="is no JSON object"):
        stop_tokens(tmp_path)


def test_a_token_between_texts_ends_them_where_nothing_else_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "text"]
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "vocab.txt").write_text("\n".join(words))
    opened = transformers.BertTokenizerFast(vocab=str(tmp_path / "words" / "vocab.txt"))
    opened.save_pretrained(tmp_path)
    found = load_tokenizer(tmp_path)
    assert found.eos == opened.sep_token_id == words.index("[SEP]")
    plain = opened("good text", add_special_tokens=False)["input_ids"]
    assert list(found.encode("good text")) == plain
