"""Tokenizers: encode and decode, the Hugging Face layout, determinism."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezero.core.errors import FileError, MissingExtraError
from lezero.data import load_tokenizer
from lezero.data.tokenizer import bytes_tokenizer, train_tokenizer

TEXTS = ["The quick brown fox. " * 20, "def f(x):\n    return x\n" * 20, "äöü 中文 🙂 " * 5]
ODD = [
    "",
    " ",
    "\n\n  x\t",
    "The fox\r\n",
    "🙂中文é",
    "a<|endoftext|>b",
    "\x00\x7f",
    "  def g(): pass",
]

TORN = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<nowhere>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {},
}
"""What puts a token around texts that it does not say."""


def trained():
    return train_tokenizer(TEXTS, 400)


def test_a_tokenizer_shows_its_size():
    assert repr(bytes_tokenizer()) == "<Tokenizer: 257 ids, end of text 256>"


@given(st.text())
def test_bytes_come_back(text):
    tokenizer = bytes_tokenizer()
    if "<|endoftext|>" not in text:
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos]) == text


@pytest.mark.parametrize("make", [bytes_tokenizer, trained])
def test_round_trip_and_save(make, tmp_path):
    tokenizer = make()
    for text in ODD:
        tokens = tokenizer.encode(text)
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
        assert tokenizer.decode(tokens) == text.replace("<|endoftext|>", "")
    assert tokenizer.encode("a<|endoftext|>b")[1] == tokenizer.eos
    tokenizer.save(tmp_path / "t")
    again = load_tokenizer(tmp_path / "t")
    assert (again.digest, again.eos, again.vocab_size) == (
        tokenizer.digest,
        tokenizer.eos,
        tokenizer.vocab_size,
    )
    assert [again.encode(text) for text in ODD] == [tokenizer.encode(text) for text in ODD]
    again.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again" / "tokenizer.json").digest == tokenizer.digest


@pytest.mark.parametrize("make", [bytes_tokenizer, trained])
def test_transformers_opens_it_with_equal_encodings(make, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = make()
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs.eos_token_id == tokenizer.eos
    assert len(theirs) == tokenizer.vocab_size
    for text in ODD + TEXTS:
        ours = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ours
        assert theirs.decode(ours, skip_special_tokens=True) == tokenizer.decode(ours)


def test_training_is_deterministic_across_processes(tmp_path):
    code = (
        "import sys; from lezero.data.tokenizer import train_tokenizer\n"
        "from tests.data.test_tokenizer import TEXTS\n"
        "print(train_tokenizer(TEXTS, 400).digest)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == trained().digest


def test_long_texts_are_encoded_in_pieces_as_a_whole(monkeypatch):
    tokenizer = trained()
    text = "\n\n".join(TEXTS * 3) + "\n  \n\n indented\nplain\n" * 50
    whole = tokenizer.encode(text)
    monkeypatch.setattr("lezero.data.tokenizer._PIECE", 100)
    assert tokenizer.encode(text) == whole
    assert bytes_tokenizer().decode(bytes_tokenizer().encode("x" * 1000)) == "x" * 1000


@pytest.mark.parametrize("end", ["\n\n", "\r\n", " \n", "\t\n\n"])
def test_a_run_of_white_space_is_not_cut(end, monkeypatch):
    tokenizer = train_tokenizer([f"alpha beta{end}" * 3 + "\n", f"x{end}  y{end}"] * 50, 400)
    text = f"alpha beta gamma delta{end}" * 60
    whole = tokenizer.encode(text)
    monkeypatch.setattr("lezero.data.tokenizer._PIECE", 100)
    assert tokenizer.encode(text) == whole


def test_a_tokenizer_that_begins_each_text_with_a_space_is_not_cut(tmp_path, monkeypatch):
    """As Llama 2's: each piece would begin with one."""
    library = pytest.importorskip("tokenizers")
    inner = library.Tokenizer(library.models.BPE(unk_token="<unk>"))
    steps = [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
    inner.normalizer = library.normalizers.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"]
    trainer = library.trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    inner.train_from_iterator(TEXTS, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    text = "\n".join(TEXTS * 20)
    monkeypatch.setattr("lezero.data.tokenizer._PIECE", 100)
    whole = inner.encode(text, add_special_tokens=False).ids
    assert load_tokenizer(tmp_path).encode(text) == whole


@pytest.mark.parametrize(
    ("content", "options", "text"),
    [
        ("[MASK]", {"lstrip": True}, "cat dog\n[MASK]"),
        ("[MASK]", {"rstrip": True}, "cat dog [MASK]\n"),
        ("cat\nthe ", {}, "cat\nthe "),
        ("cat the", {"normalized": False}, "dog cat the\n"),
    ],
)
def test_added_tokens_that_reach_across_white_space_are_not_cut(
    content, options, text, tmp_path, monkeypatch
):
    library = pytest.importorskip("tokenizers")
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=letters
    )
    inner.train_from_iterator(["the cat"], trainer)
    inner.add_tokens([library.AddedToken(content, **options)])
    inner.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    whole = inner.encode(text * 90, add_special_tokens=False).ids
    assert inner.token_to_id(content) in whole
    for piece in (50, 51, 52, 100):
        monkeypatch.setattr("lezero.data.tokenizer._PIECE", piece)
        assert load_tokenizer(tmp_path).encode(text * 90) == whole


def test_bad_folders_are_explained(tmp_path):
    with pytest.raises(FileError, match="no such file or folder"):
        load_tokenizer(tmp_path / "missing")
    trained().save(tmp_path / "t")
    (tmp_path / "t" / "tokenizer.json").write_text("{broken")
    with pytest.raises(FileError, match="not a tokenizer file"):
        load_tokenizer(tmp_path / "t")
    trained().save(tmp_path / "u")
    content = (tmp_path / "u" / "tokenizer.json").read_text().replace("<|endoftext|>", "<odd>")
    (tmp_path / "u" / "tokenizer.json").write_text(content)
    with pytest.raises(FileError, match="no end-of-text token"):
        load_tokenizer(tmp_path / "u")
    (tmp_path / "u" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<odd>"}))
    assert load_tokenizer(tmp_path / "u").eos == trained().eos
    (tmp_path / "empty").mkdir()
    with pytest.raises((FileError, MissingExtraError)):
        load_tokenizer(tmp_path / "empty")


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("said", ["config", "map"])
def test_a_folder_without_tokenizer_json_keeps_its_special_tokens(said, starts, tmp_path):
    """Its end token is not <|endoftext|>, which is in the vocabulary all the same."""
    transformers = pytest.importorskip("transformers")
    folder, text = tmp_path / "gpt", TEXTS[0]
    trained().save(tmp_path / "own")
    content = json.loads((tmp_path / "own" / "tokenizer.json").read_text())["model"]
    vocab = content["vocab"] | {"</s>": 400, "<s>": 401}
    end = {"content": "</s>", "__type": "AddedToken", "special": True}
    settings = {"eos_token": end, "bos_token": "<s>", "add_bos_token": starts}
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    lines = [m if isinstance(m, str) else " ".join(m) for m in content["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n")
    kind = {"tokenizer_class": "GPT2Tokenizer", "chat_template": "{{ messages }}"}
    where = {"config": {"tokenizer_config.json": kind | settings}}.get(
        said, {"special_tokens_map.json": settings, "tokenizer_config.json": kind}
    )
    for name, content in where.items():
        (folder / name).write_text(json.dumps(content))
    found = load_tokenizer(folder)
    found.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert found.eos == again.eos == 400
    assert found.start == again.start == (401,) * starts
    for place in (folder, tmp_path / "saved"):
        theirs = transformers.AutoTokenizer.from_pretrained(str(place))
        assert theirs(text).input_ids == [*found.start, *found.encode(text)]
    assert found.digest == again.digest
    assert found.encode(text) == again.encode(text) == trained().encode(text)
    assert (
        json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text()).get("chat_template")
        == "{{ messages }}"
    )


def test_a_file_of_another_name_is_saved_as_itself(tmp_path):
    folder = tmp_path / "several"
    train_tokenizer(TEXTS, 300).save(folder)  # another one, beside it
    trained().save(tmp_path / "own")
    shutil.copyfile(tmp_path / "own" / "tokenizer.json", folder / "wiki.json")
    (folder / "vocab.json").write_text("{}")
    found = load_tokenizer(folder / "wiki.json")
    found.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").digest == found.digest == trained().digest
    assert not (tmp_path / "saved" / "vocab.json").exists()
    bytes_tokenizer().save(folder)
    assert load_tokenizer(folder / "wiki.json").digest == trained().digest


def test_a_model_folder_without_a_tokenizer_is_told_so(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(FileError, match="the folder holds no tokenizer; copy"):
        load_tokenizer(tmp_path)
    for kind in ("qwen2", "bert", "llama"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(FileError, match="the folder holds no tokenizer; copy"):
            load_tokenizer(tmp_path)


def test_truncation_in_a_tokenizer_file_is_not_applied(tmp_path):
    trained().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst"}
    content["truncation"]["stride"] = 0
    path.write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == trained().encode(TEXTS[0])
    shutil.rmtree(tmp_path)


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"lezero\[text\]"):
        trained()


def test_special_tokens_and_the_bytes_of_others(tmp_path):
    ours = bytes_tokenizer()
    ours.save(tmp_path / "bytes")
    settings = tmp_path / "bytes" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"lezero"', '"other"'))
    backed = load_tokenizer(tmp_path / "bytes")
    assert backed.special == ours.special == {256: "<|endoftext|>"}
    for tokenizer in (ours, backed):
        assert [tokenizer.bytes_of(byte) for byte in range(256)] == [
            bytes([byte]) for byte in range(256)
        ]
    assert ours.bytes_of(256) is None
    assert backed.bytes_of(1000) is None
    trained = train_tokenizer(["中中中中 the the the"], 270)
    token = trained.encode("中")[0]
    assert "中".encode().startswith(trained.bytes_of(token) or b"?")


def test_a_folder_of_bare_vocabularies_says_what_is_missing(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\na\nb\n")
    with pytest.raises(FileError, match=r"do not say of which kind it is; copy .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_panics_is_an_error_of_its_file(tmp_path):
    trained().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": TORN}))
    with pytest.raises(FileError, match=r"tokenizer\.json: the tokenizer fails .*copy"):
        load_tokenizer(tmp_path)
