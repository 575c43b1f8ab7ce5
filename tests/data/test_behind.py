"""Responses behind their prompts, with tokenizers that put a space before a text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lezero.data import DataConfig, load_tokenizer, prepare
from lezero.data.behind import Behind
from lezero.data.tokenizer import bytes_tokenizer, train_tokenizer

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["a rose is a rose is a rose.", "It is 42 and 42. is it?", "a\n\nrose.\nIt is"] * 20
RESPONSES = ["42.", " 42.", "  a", "\n\nrose", ". It", "é", "is it?"]


def llama(folder, joined=""):
    """A vocabulary of SentencePiece as Llama 2 has it. joined: a piece beside, of two letters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *sorted({x for x in "".join(WORDS) if x not in " \n"}), "▁4", "42", "is", "▁is"]
    merges = [("▁", "4"), ("4", "2"), ("i", "s"), ("▁", "is")]
    if joined:
        pieces += [*dict.fromkeys(x for x in joined if x not in pieces), joined]
        merges.append((joined[0], joined[1]))
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    n, d = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")])
    steps = [d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
    made.decoder = d.Sequence(steps)
    made.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def spaced(folder):
    """Byte-level BPE that puts a space before a text, as RoBERTa's may."""
    train_tokenizer(WORDS, 400).save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_rows_of_pairs_decode_to_prompt_and_response(tmp_path):
    pairs = [
        {"prompt": f"It is {i}:" + "</s>" * (i % 2), "response": text}
        for i, text in enumerate(RESPONSES)
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    folder = llama(tmp_path / "llama")
    given = {"tokenizer": {"folder": str(folder)}, "validation": 0.0, "sequence": 40}
    data = prepare(DataConfig(train=[str(tmp_path / "d.jsonl")], **given), tmp_path / "cache")
    for pair, i in zip(pairs, range(len(data.train)), strict=True):
        tokens, targets = data.train.row(i)
        said = data.tokenizer.decode(tokens)
        assert said == pair["prompt"].replace("</s>", "") + pair["response"]
        learned = np.flatnonzero(targets != -100)
        asked = data.tokenizer.encode(pair["prompt"])
        assert tokens[: learned[0] + 1].tolist() == asked, "as they are when the model is asked"


@pytest.mark.parametrize("joined", ["\n\n", ".I"])
def test_a_sign_that_the_vocabulary_joins_to_the_text_is_not_used(tmp_path, joined):
    tokenizer = load_tokenizer(llama(tmp_path / "llama", joined=joined))
    before = tokenizer.encode("It")
    for text in RESPONSES:
        assert tokenizer.decode([*before, *Behind(tokenizer).encode(text)]) == "It" + text


def test_a_space_before_byte_level_texts_is_left_out(tmp_path):
    tokenizer = load_tokenizer(spaced(tmp_path / "spaced"))
    assert tokenizer.decode(tokenizer.encode("42")) == " 42"
    assert tokenizer.decode(Behind(tokenizer).encode("42")) == "42"


@pytest.mark.parametrize("make", [bytes_tokenizer, lambda: train_tokenizer(WORDS, 400)])
def test_where_no_space_is_put_texts_are_encoded_as_they_are(make):
    tokenizer = make()
    for text in (*RESPONSES, *WORDS[:3]):
        assert Behind(tokenizer).encode(text) == tokenizer.encode(text)
