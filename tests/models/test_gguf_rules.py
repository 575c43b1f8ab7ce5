"""Vocabularies of GGUF files are read as llama.cpp reads them, where transformers does not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lezero.core.errors import FileError
from lezero.data import load_tokenizer
from lezero.models import gguf_tokenizer
from lezero.models.gguf_splits import split_of

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
BYTES = ["h", "i", "hi", "x", "Ġ", "ĠĠ", "a"]
DIGITS = [*BYTES, "1", "11", "ĉ", "ĉa", "Ġ1", "!", "!1"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path / "cache"))


def write(path: Path, model: str, tokens: list[str], types: dict[int, int], **said: Any) -> Path:
    """types: of the tokens that are not normal ones, by number."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types([types.get(i, 1) for i in range(len(tokens))])
    if model == "llama":
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        merges = ["h i", "Ġ Ġ", "1 1", "ĉ a", "Ġ 1", "! 1"]
        writer.add_token_merges([x for x in merges if x.replace(" ", "") in tokens])
    adds = {int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool}
    for key, value in said.items():
        adds[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_special_tokens_outside_the_byte_alphabet_keep_their_ids(tmp_path: Path) -> None:
    tokens = [*BYTES, BEGIN, END, "<｜User｜>", "<think>", "  "]
    ids = {"bos_token_id": 7, "eos_token_id": 8, "add_bos_token": True, "pre": "deepseek-r1-qwen"}
    types = {7: 3, 8: 3, 9: 3, 10: 4, 11: 4}
    file = write(tmp_path / "a.gguf", "gpt2", tokens, types, **ids)
    found = gguf_tokenizer(file)
    assert [found.convert_tokens_to_ids(x) for x in tokens] == list(range(12))
    assert (found.bos_token_id, found.eos_token_id, len(found)) == (7, 8, 12)
    assert found(f"{tokens[9]}hi<think>  x{END}").input_ids == [7, 9, 2, 10, 11, 3, 8]
    assert max(found("<|endoftext|>").input_ids) < 12
    assert found.decode([7, 9, 2, 10, 8], skip_special_tokens=True) == "hi<think>"
    gguf_tokenizer(file, save_to=str(tmp_path / "saved"))
    saved = load_tokenizer(tmp_path / "saved")
    assert (saved.eos, saved.start, saved.encode(f"hi{END}")) == (8, (7,), [2, 8])


@pytest.mark.parametrize(
    ("name", "text", "tokens"),
    [  # as llama.cpp gives them
        ("smollm", "x  1", ["x", "ĠĠ", "1"]),
        ("smollm", "x 11", ["x", "Ġ", "1", "1"]),
        ("gpt-2", "x  11", ["x", "Ġ", "Ġ", "11"]),
        ("gpt-2", "\ta", ["ĉ", "a"]),
        ("deepseek-coder", "\ta 11", ["ĉa", "Ġ", "1", "1"]),
        ("llama-bpe", "x 11", ["x", "Ġ", "11"]),
        ("qwen2", "x  11", ["x", "Ġ", "Ġ", "1", "1"]),
        ("default", "x 11!", ["x", "Ġ", "11", "!"]),
    ],
)
def test_words_are_cut_as_the_file_names_it(
    tmp_path: Path, name: str, text: str, tokens: list[str]
) -> None:
    found = gguf_tokenizer(write(tmp_path / "a.gguf", "gpt2", DIGITS, {}, pre=name))
    assert found.convert_ids_to_tokens(found(text).input_ids) == tokens
    assert found.decode(found(text).input_ids) == text


def test_words_are_cut_as_by_transformers_where_it_knows_the_name(tmp_path: Path) -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    signs = "aZé中ى١9 7\t\n\r .,!'\"/(_$€❤\ufe0f\u0301\u0940ǅ\u00a0\u200d😀"
    drawn = random.Random(0)
    texts = ["".join(drawn.choices(signs, k=12)) for _ in range(200)] + ["I ❤\ufe0f you 'Re it's"]
    for name, expression in mapping.GGUF_PRE_TOKENIZER_SPLITS.items():
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
        bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        right = tokenizers.pre_tokenizers.Sequence([split, bytes_])
        mine = split_of(name, tmp_path)
        for text in texts:
            assert mine.pre_tokenize_str(text) == right.pre_tokenize_str(text), (name, text)


def test_a_cut_that_nobody_names_is_llama_cpps_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = gguf_tokenizer(write(tmp_path / "a.gguf", "gpt2", DIGITS, {}))
    assert found.convert_ids_to_tokens(found("x 11!").input_ids) == ["x", "Ġ", "11", "!"]
    assert "does not say how it cuts a text into words" in caplog.text


@pytest.mark.parametrize("name", ["of-tomorrow", 7])
def test_a_cut_that_is_not_known_is_refused(tmp_path: Path, name: Any) -> None:
    file = write(tmp_path / "a.gguf", "gpt2", DIGITS, {}, pre=name)
    with pytest.raises(FileError, match=rf"tokenizer\.ggml\.pre is {name!r}.*Hugging Face folder"):
        gguf_tokenizer(file)


def test_a_special_token_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", "gpt2", [*BYTES, END, END], {7: 3, 8: 3}, eos_token_id=7)
    with pytest.raises(FileError, match=r"token 7.*twice.*Hugging Face folder"):
        gguf_tokenizer(file)


PIECES = ["<unk>", "<s>", "</s>", "▁", "[", "]", "x", "▁x", "▁[", "<|im_start|>", "u", "▁u"]


def test_a_space_is_before_each_stretch_of_text_of_a_sentencepiece_file(tmp_path: Path) -> None:
    types, ids = {0: 2, 1: 3, 2: 3, 9: 4}, {"bos_token_id": 1, "eos_token_id": 2}
    file = write(tmp_path / "a.gguf", "llama", PIECES, types, **ids)
    found = gguf_tokenizer(file)
    assert found("[x] x").input_ids == [1, 8, 6, 5, 7]
    assert found("<s>[x", add_special_tokens=False).input_ids == [1, 8, 6]
    assert found("<|im_start|>u</s> x", add_special_tokens=False).input_ids == [9, 11, 2, 3, 7]
    assert found.decode([8, 6, 5, 7]) == "[x] x"
    ids["add_space_prefix"] = False
    found = gguf_tokenizer(write(tmp_path / "b.gguf", "llama", PIECES, types, **ids))
    assert found("[x] x<|im_start|>u").input_ids == [1, 4, 6, 5, 7, 9, 10]
    assert found.decode([7, 7]) == " x x"


@pytest.mark.parametrize(
    ("said", "begins"),
    [
        ({"pre": "llama-bpe"}, [8]),
        ({"pre": "tekken"}, [8]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"pre": "qwen2"}, []),
    ],
)
def test_texts_begin_with_a_token_where_no_key_says_so(
    said: dict[str, Any], begins: list[int], tmp_path: Path
) -> None:
    tokens = [*BYTES, "xi", "<|begin_of_text|>"]
    file = write(tmp_path / "a.gguf", "gpt2", tokens, {8: 3}, bos_token_id=8, **said)
    found = gguf_tokenizer(file)
    whole = said["pre"] != "qwen2"  # no merge makes this word
    assert found("xi").input_ids == [*begins, *([7] if whole else [3, 1])]
    pair = found("hi", "hi")
    assert pair.input_ids == [*begins, 2, *begins, 2]
