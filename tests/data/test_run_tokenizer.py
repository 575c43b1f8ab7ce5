"""The tokenizer in a run's folder: as it was trained, and of no earlier one."""

from __future__ import annotations

import json
import os

import pytest

from lezero.data import load_tokenizer
from lezero.data.run_tokenizer import save_as_trained
from lezero.data.tokenizer import bytes_tokenizer
from tests.data.test_behind import llama

tokenizers = pytest.importorskip("tokenizers")


def with_start(folder):
    """Puts <s> before each text, and says so in both files."""
    llama(folder)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True}
    about["tokenizer_class"] = "LlamaTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    return load_tokenizer(folder)


def test_what_is_put_around_a_text_is_left_out(tmp_path):
    hf = pytest.importorskip("transformers")
    tokenizer = with_start(tmp_path / "model")
    assert tokenizer.start == (1,)
    save_as_trained(tokenizer, tmp_path / "run")
    found = load_tokenizer(tmp_path / "run")
    assert found.start == ()
    assert (tmp_path / "run/chat_template.jinja").is_file()
    theirs = hf.AutoTokenizer.from_pretrained(str(tmp_path / "run"))
    assert theirs("It is 42")["input_ids"] == found.encode("It is 42")
    assert found.encode("It is 42") == tokenizer.encode("It is 42")


def test_nothing_of_an_earlier_tokenizer_stays(tmp_path):
    save_as_trained(with_start(tmp_path / "model"), tmp_path / "run")
    save_as_trained(bytes_tokenizer(), tmp_path / "run")
    bytes_tokenizer().save(tmp_path / "bytes")
    assert sorted(os.listdir(tmp_path / "run")) == sorted(os.listdir(tmp_path / "bytes"))
    assert load_tokenizer(tmp_path / "run").digest == bytes_tokenizer().digest
    assert sorted(os.listdir(tmp_path)) == ["bytes", "model", "run"]
