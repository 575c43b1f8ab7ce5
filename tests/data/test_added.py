"""Tokens that settings declare beside tokenizer.json are read as transformers reads them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lezero.core.errors import FileError
from lezero.data.tokenizer import load_tokenizer, train_tokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
START, END, NEW = "<|im_start|>", "<|im_end|>", "<Tool>"
TEXTS = [
    f"{START}user\nhi{END}\n",
    f"a  {START}  b {END}\n {NEW} <tool> x<s>",
    f"{NEW}{NEW.lower()} {START.upper()} in<unk> a word <s>",
]
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False}
PLAIN = {**_PLAIN, "normalized": False, "special": True}


def folder_of(place: Path, files: dict[str, Any]) -> Path:
    """START is 300, END 301 (plain vocabulary), "<s>" 302 (added and special)."""
    train_tokenizer(["a few words, a few more words"] * 9, 300).save(place)
    file = place / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    count = max(vocab.values()) + 1
    vocab |= {f"<unused {number}>": number for number in range(count, 300)}
    vocab |= {START: 300, END: 301}
    content["added_tokens"] += [{"id": 302, "content": "<s>", **PLAIN}]
    content["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(content))
    (place / "special_tokens_map.json").unlink()
    for name, settings in files.items():
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        more = config if name == "tokenizer_config.json" else {}
        (place / name).write_text(json.dumps({**more, **settings}))
    return place


def listed(**changes: Any) -> dict[str, Any]:
    tokens = {"300": START, "301": END, "303": NEW}
    every = {i: {**PLAIN, **changes, "content": text} for i, text in tokens.items()}
    return {"tokenizer_config.json": {"added_tokens_decoder": every}}


def named(**settings: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": settings}


START_S = {"302": {**PLAIN, "content": "<s>", "rstrip": True}}
SPECIAL_OF_MAP = {"pad_token": {"content": START, **_PLAIN, "rstrip": True, "normalized": True}}
SHOWN = {"300": {**PLAIN, "content": START, "special": False}}
FOLDERS = {
    "listed": listed(),
    "not special": listed(special=False),
    "normalized": listed(normalized=True, special=False),
    "lstrip": listed(lstrip=True),
    "rstrip": listed(rstrip=True),
    "single word": listed(single_word=True),
    "flagged otherwise": {"tokenizer_config.json": {"added_tokens_decoder": START_S}},
    "listed and named": named(added_tokens_decoder=SHOWN, pad_token=START),
    "listed and another": named(added_tokens_decoder=SHOWN, additional_special_tokens=[START]),
    "none listed": named(added_tokens_decoder={}),
    "named": named(pad_token=START, image_token=END),
    "named with flags": named(pad_token={"__type": "AddedToken", "content": START, "lstrip": True}),
    "others": named(additional_special_tokens=[START, END]),
    "extra": named(extra_special_tokens=[START], additional_special_tokens=[END]),
    "extra by name": named(extra_special_tokens={"voice_token": START}),
    "map": {**named(), "special_tokens_map.json": SPECIAL_OF_MAP},
    "others of the map": {
        **named(),
        "special_tokens_map.json": {"additional_special_tokens": [START]},
    },
    "map that does not count": {
        **named(added_tokens_decoder={}),
        "special_tokens_map.json": {"pad_token": START},
    },
    "listed elsewhere": named(added_tokens_decoder={"7": {**PLAIN, "content": START}}),
    "listed twice": named(
        added_tokens_decoder={str(i): {**PLAIN, "content": NEW} for i in (303, 4)}
    ),
    "empty": named(added_tokens_decoder={"5": {**PLAIN, "content": ""}}),
    "old list elsewhere": {**named(), "added_tokens.json": {START: 7, "<s>": 9}},
    "old list": {
        **named(),
        "added_tokens.json": {START: 300, END: 301, NEW: 303, "<s>": 302},
        "special_tokens_map.json": {"pad_token": START},
    },
}


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_declared_tokens_are_read_as_by_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = folder_of(tmp_path / "made", files)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text in TEXTS:
        tokens = ours.encode(text)
        assert tokens == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special.keys() == special
    assert ours.vocab_size == len(theirs)
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.digest, again.special) == (ours.digest, ours.special)


def test_flags_decide_the_digest(tmp_path: Path) -> None:
    made = {name: folder_of(tmp_path / name, files) for name, files in FOLDERS.items()}
    digest = {name: load_tokenizer(place).digest for name, place in made.items()}
    assert digest["none listed"] == digest["map that does not count"]
    assert len({digest[x] for x in ("none listed", "listed", "lstrip", "flagged otherwise")}) == 4


def test_a_token_that_is_special_no_more_is_shown(tmp_path: Path) -> None:
    shown = {"302": {**PLAIN, "content": "<s>", "special": False}}
    found = load_tokenizer(folder_of(tmp_path, named(added_tokens_decoder=shown)))
    assert found.encode("a<s>")[-1] == 302
    assert found.decode([302]) == "<s>"
    assert 302 not in found.special


def test_a_named_token_that_no_vocabulary_has_stays_text(tmp_path: Path) -> None:
    found = load_tokenizer(folder_of(tmp_path, named(pad_token="<pad>")))
    assert found.vocab_size == 303
    assert found.decode(found.encode("<pad>")) == "<pad>"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"added_tokens.json": {NEW: "7"}}, r"added_tokens\.json: '<Tool>': got '7'"),
        (named(added_tokens_decoder=[]), "added_tokens_decoder: is no JSON object"),
        (named(added_tokens_decoder={"x": {}}), r"\['x'\]: is no token's number"),
        (named(added_tokens_decoder={"1": "a"}), r"\['1'\]: got 'a'"),
        (named(added_tokens_decoder={"1": {"content": NEW, "lstrip": 3}}), "lstrip: got 3"),
        (named(pad_token={"content": "a", "lstrip": 3}), "'a': lstrip: got 3"),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    tmp_path: Path, files: dict[str, Any], says: str
) -> None:
    with pytest.raises(FileError, match=says):
        load_tokenizer(folder_of(tmp_path, files))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (named(added_tokens_decoder={"302": {**PLAIN, "content": NEW}}), "'<Tool>' as 302"),
        (named(added_tokens_decoder={"310": {**PLAIN, "content": NEW}}), "'<Tool>' as 310"),
        ({"added_tokens.json": {NEW: 7}}, "'<Tool>' as 7"),
    ],
)
def test_a_listed_token_that_cannot_have_its_id_stays_text(
    tmp_path: Path, files: dict[str, Any], says: str, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    plain = load_tokenizer(folder_of(tmp_path / "plain", named()))
    found = load_tokenizer(folder_of(tmp_path / "made", files))
    assert [found.encode(text) for text in TEXTS] == [plain.encode(text) for text in TEXTS]
    assert found.vocab_size == 303
    (said,) = caplog.messages
    assert f"do not fit tokenizer.json, {says}: they stay text" in said


@pytest.mark.parametrize(
    ("files", "config"),
    [
        ({"added_tokens.json": {START: 300, NEW: 303}}, {"vocab_size": 303}),
        (listed(), {"text_config": {"vocab_size": 303}}),
        ({**listed(), "special_tokens_map.json": {}}, {"vocab_size": 303, "eos_token_id": 301}),
    ],
)
def test_a_new_token_beyond_the_model_stays_text_after_a_save_too(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any], monkeypatch: Any, caplog: Any
) -> None:
    """As where someone declared a token to pad with, and did not make the model larger."""
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    folder = folder_of(tmp_path / "made", files)
    if "eos_token_id" in config:
        file = folder / "tokenizer.json"
        file.write_text(file.read_text().replace("<|endoftext|>", "<odd>"))
    of_no_size = {"eos_token_id": config.get("eos_token_id")}
    (folder / "config.json").write_text(json.dumps(of_no_size))
    assert load_tokenizer(folder).vocab_size == 304
    assert not caplog.messages
    (folder / "config.json").write_text(json.dumps(config))
    found = load_tokenizer(folder)
    assert "lists tokens beyond the 303 of the model, '<Tool>' as 303" in caplog.text
    found.save(tmp_path / "saved")  # as beside a run, where no config.json is
    again = load_tokenizer(tmp_path / "saved")
    for each in (found, again):
        assert (each.vocab_size, each.digest, each.eos) == (303, found.digest, found.eos)
        assert each.encode(START) == [300]
        assert each.decode(each.encode(NEW)) == NEW.lower()
    assert found.eos == config.get("eos_token_id", found.eos)
    # And where the model is saved beside that, and then made larger.
    for rows in (303, 304):
        (tmp_path / "saved" / "config.json").write_text(json.dumps({"vocab_size": rows}))
        assert load_tokenizer(tmp_path / "saved").vocab_size == rows


@pytest.mark.parametrize("listed_too", [False, True])
def test_a_token_that_is_added_beyond_the_model_stays_text(
    tmp_path: Path, monkeypatch: Any, caplog: Any, listed_too: bool
) -> None:
    """As where one to pad with was added in tokenizer.json itself."""
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    more = {"302": {**PLAIN, "content": "<s>"}} if listed_too else {}
    folder = folder_of(tmp_path / "made", named(added_tokens_decoder=more, pad_token="<s>"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 302}))
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_padding(pad_id=302, pad_token="<s>", length=9)  # as left by padding="max_length"
    inner.save(str(folder / "tokenizer.json"))
    found = load_tokenizer(folder)
    (said,) = caplog.messages
    assert "tokenizer.json adds tokens beyond the 302 of the model, '<s>' as 302: they stay" in said
    found.save(tmp_path / "saved")
    for each in (found, load_tokenizer(tmp_path / "saved")):
        assert (each.vocab_size, each.digest) == (302, found.digest)
        assert each.decode(each.encode("a <s>")) == "a <s>"
    (folder / "config.json").write_text(json.dumps({"vocab_size": 301}))
    assert load_tokenizer(folder).vocab_size == 302, "plain vocabulary is never left out"


def test_a_token_beyond_the_model_that_begins_each_text_is_not_left_out(tmp_path: Path) -> None:
    """The model's run says what is wrong then."""
    folder = folder_of(tmp_path, {})
    begin = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 302)])
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = begin
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 302}))
    assert load_tokenizer(folder).vocab_size == 303


def test_a_token_that_ends_texts_is_not_left_out_beside_an_older_config(tmp_path: Path) -> None:
    """Of a model that was made smaller or never grown; a run of a new model takes all tokens."""
    folder = folder_of(tmp_path, named(eos_token="<s>"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 302, "eos_token_id": 0}))
    found = load_tokenizer(folder)
    assert (found.vocab_size, found.eos) == (303, 302)
    assert found.encode("a<s>")[-1] == 302


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"image_token": "<s>"}, ["<s>", "<t>"]),
        ({"eos_token": "<s>", "image_token": "<t>"}, ["<t>"]),
        ({"eos_token": "<t>", "image_token": "<s>"}, []),  # else "<t>" would be 302
    ],
)
def test_only_tokens_that_begin_or_end_texts_are_kept_beyond_the_model(
    tmp_path: Path, names: dict[str, str], text: list[str]
) -> None:
    """As in the folders of Gemma 3's text models, which name a token for images."""
    folder = folder_of(tmp_path / "made", named(**names))
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<t>"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 302}))
    found = load_tokenizer(folder)
    found.save(tmp_path / "saved")
    for each in (found, load_tokenizer(tmp_path / "saved")):
        assert (each.vocab_size, each.digest) == (304 - len(text), found.digest)
        for number, token in ((302, "<s>"), (303, "<t>")):
            assert (each.encode(token) == [number]) == (token not in text)
            assert each.decode(each.encode(token)) == (token if token in text else "")


def test_a_plain_token_that_ends_texts_by_the_model_alone_stays_plain(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "made", {})
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<odd>"))
    for name, content in (("config.json", {"eos_token_id": 301}), ("tokenizer_config.json", {})):
        (folder / name).write_text(json.dumps(content))
    found = load_tokenizer(folder)
    found.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (found.eos, found.digest) == (again.eos, again.digest) == (301, again.digest)
    for text in TEXTS:
        tokens = theirs(text, add_special_tokens=False)["input_ids"]
        assert found.encode(text) == again.encode(text) == tokens
