"""Which tokens of a GGUF file end an answer; its tokenizer is converted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lezero.core.errors import FileError
from lezero.models import (
    Transformer,
    gguf_end_tokens,
    gguf_tokenizer,
    gguf_vocabulary,
    packaged_gguf,
)
from tests.models.test_gguf import CONFIG, gguf, write


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        ({}, set()),
        ({"eos": 3, "eot": 5, "eom": 1999}, {3, 5, 1999}),
        ({"eos": 3, "fim_pad": 4}, {3, 4}),
    ],
)
def test_the_ends_of_text_turn_and_message_are_told(
    ids: dict[str, int], ends: set[int], tmp_path: Path
) -> None:
    said = {f"tokenizer__ggml__{kind}_token_id": token for kind, token in ids.items()}
    assert gguf_end_tokens(write(tmp_path / "a.gguf", Transformer(CONFIG), **said)) == ends
    none = {f"tokenizer__ggml__{kind}_token_id": (1 << 32) - 1 for kind in ("eot", "eom")}
    file = write(
        tmp_path / "b.gguf", Transformer(CONFIG), **none, tokenizer__ggml__eos_token_id=2000
    )
    assert gguf_end_tokens(file) == set()


def test_ends_that_a_file_does_not_give_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf.GGUFWriter.add_token_list

    def add_with_ends(writer: Any, tokens: list[str]) -> None:
        tokens[1990:1994] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"]
        tokens[1994:1997] = ["<|endoftext|>", "<|end_of_text|>", "<|file_sep|>"]
        add(writer, tokens)
        writer.add_token_types([1] * 1990 + [3, 4, 1, 3, 3, 3, 3] + [1] * 3)

    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", add_with_ends)
    model, ids = Transformer(CONFIG), {"tokenizer__ggml__eos_token_id": 5}
    named = {1990, 1991, 1993, 1994, 1995, 1996}
    file = write(tmp_path / "a.gguf", model, **ids)
    assert gguf_end_tokens(file) == {5, *named}
    ids["tokenizer__ggml__eot_token_id"] = 6
    assert gguf_end_tokens(write(tmp_path / "b.gguf", model, **ids)) == {5, 6, *named}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    pytest.importorskip("transformers")
    try:
        return packaged_gguf()
    except FileError as error:
        pytest.skip(str(error))


def test_a_vocabulary_is_converted_once(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path / "cache"))
    made: list[Path] = []
    first = gguf_vocabulary._converted(smollm2)
    monkeypatch.setattr(gguf_vocabulary, "_converted", lambda file: made.append(file) or first)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(smollm2.read_bytes())
    for file in (smollm2, smollm2, copy):
        assert gguf_tokenizer(file)("to be").input_ids
    assert made == [smollm2]
    data = copy.read_bytes()
    copy.write_bytes(data.replace(b"You are a helpful AI", b"You are a hateful AI", 1))
    assert copy.read_bytes() != data  # its chat template
    gguf_tokenizer(copy)
    assert made == [smollm2, copy]
