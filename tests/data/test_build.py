"""From files to rows: splitting, caching, corruption, prompts, several ranks."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from lezero.core import groups
from lezero.core.errors import ConfigError, FileError
from lezero.data import DataConfig, Loader, corpus, prepare
from lezero.data.build import foresee_cache, foresee_rows
from lezero.data.corpus import python_docs


def config(folder, **settings):
    settings = {"tokenizer": "bytes", "sequence": 8, "validation": 0.0, **settings}
    return DataConfig(train=[str(folder)], **settings)


def jsonl(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records))


def text_of(rows, tokenizer):
    """The text of text rows, put together again."""
    first = rows.row(0)[0][:1]
    targets = np.concatenate([rows.row(i)[1] for i in range(len(rows))])
    return [*first.tolist(), *targets[targets != -100].tolist()]


def test_stream_holds_every_token_once_with_document_ends(tmp_path):
    (tmp_path / "a.txt").write_text("hello world")
    (tmp_path / "b.txt").write_text("and good bye")
    data = prepare(config(tmp_path), tmp_path / "cache")
    eos = data.tokenizer.eos
    assert text_of(data.train, data.tokenizer) == [
        *b"hello world",
        eos,
        *b"and good bye",
        eos,
    ]
    assert data.validation is None
    assert data.train.row(0)[1].tolist() == [*b"ello wor"]
    with pytest.raises(IndexError):
        data.train.row(len(data.train))


def test_rows_longer_than_the_text_are_told(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("hello world")
    given = config(tmp_path, sequence=100)
    foresee_rows(given)
    prepare(given, tmp_path / "cache")
    foresee_rows(config(tmp_path))
    foresee_rows(config(tmp_path / "missing", sequence=100))
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "data.sequence: a row has 100 tokens and the whole training text at most 12 tokens",
        "data.sequence: a row has 100 tokens and the whole training text 12 tokens",
    ]


def test_loss_is_on_the_response_only(tmp_path):
    jsonl(tmp_path / "d.jsonl", {"prompt": "ab", "response": "xyz"})
    data = prepare(config(tmp_path), tmp_path / "cache")
    tokens, targets = data.train.row(0)
    eos = data.tokenizer.eos
    assert tokens.tolist() == [*b"abxyz", eos, eos, eos]
    assert targets.tolist() == [-100, *b"xyz", eos, -100, -100, -100]


@pytest.mark.parametrize(
    ("prompt", "response", "inputs", "learned"),
    [
        ("abcdefghij", "xyz", b"fghijxyz", [*b"xyz", 256]),  # the prompt's beginning goes first
        ("ab", "0123456789", b"ab012345", [*b"0123456"]),  # then the response's end
        ("abcdef", "0123456789", b"ef012345", [*b"0123456"]),  # a quarter of the row is prompt
        ("", "xy", b"xy", [*b"y", 256]),
    ],
)
def test_long_pairs_are_cut_and_keep_some_prompt(tmp_path, prompt, response, inputs, learned):
    jsonl(tmp_path / "d.jsonl", {"prompt": prompt, "response": response})
    rows = prepare(config(tmp_path), tmp_path / "cache").train
    tokens, targets = rows.row(0)
    assert bytes(tokens[: len(inputs)].tolist()) == inputs
    assert targets[targets != -100].tolist() == learned
    assert rows.cut == (len(prompt) + len(response) > 8)


def test_documents_are_held_out_by_their_words(tmp_path):
    jsonl(tmp_path / "d.jsonl", *({"text": f"document {i:04}"} for i in range(400)))
    once = prepare(config(tmp_path, validation=0.25, sequence=14), tmp_path / "c")
    held = {once.tokenizer.decode(once.validation.row(i)[0][:13]) for i in range(20)}
    share = once.validation.tokens / (once.validation.tokens + once.train.tokens)
    assert 0.17 < share < 0.33
    lines = (tmp_path / "d.jsonl").read_text().splitlines()
    (tmp_path / "d.jsonl").write_text("\n".join(reversed(lines)))
    again = prepare(config(tmp_path, validation=0.25, sequence=14), tmp_path / "c")
    later = {
        again.tokenizer.decode(again.validation.row(i)[0][:13])
        for i in range(len(again.validation))
    }
    assert again.validation.tokens == once.validation.tokens
    assert {text.strip() for text in held} <= {text.strip() for text in later}


def test_a_single_document_is_divided_near_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i:03}\n" for i in range(100)))
    data = prepare(config(tmp_path, validation=0.1), tmp_path / "cache")
    assert data.validation.tokens == 10 * 9 + 1
    assert data.train.tokens == 90 * 9 + 1


def test_a_single_pair_cannot_be_divided(tmp_path):
    pair = {"prompt": "ab", "response": "xyz"}
    jsonl(tmp_path / "d.jsonl", pair, pair, {"text": ""})  # one document: the others are left out
    said = r"data.validation: got 0.1, but .*d.jsonl.* is the only document, and a prompt with"
    with pytest.raises(ConfigError, match=said):
        prepare(config(tmp_path, validation=0.1), tmp_path / "cache")
    assert prepare(config(tmp_path, validation=0.0), tmp_path / "cache").validation is None
    jsonl(tmp_path / "d.jsonl", pair, {"prompt": "cd", "response": "uvw"})
    data = prepare(config(tmp_path, validation=0.1), tmp_path / "cache")
    assert (len(data.train), len(data.validation)) == (1, 1)


LONG = "x y " * 25_000


@pytest.mark.parametrize(
    ("text", "share", "held"),
    [
        ("Title\n" + LONG, 0.05, 5_001),  # the only line end is far away: a space
        (LONG[:-5_500] + "\n" + LONG[-5_500:], 0.05, 5_500),  # one before the place
        (LONG[:-4_500] + "\n" + LONG[-4_500:], 0.05, 4_500),  # one after it
        (LONG[:-500] + "\n" + LONG[-500:], 0.05, 5_001),
        ("\n" + "x" * 99_999 + "\n", 0.05, 5_000),  # neither line nor space
        ("x\n", 0.05, 1),
        ("xy", 0.9999, 1),
        ("\n\n\nxyz", 0.9999, 5),
    ],
)
def test_the_cut_of_a_single_document_is_near_the_share(tmp_path, text, share, held):
    (tmp_path / "a.txt").write_text(text)
    data = prepare(config(tmp_path, validation=share, sequence=2), tmp_path / "cache")
    assert data.validation.tokens == pytest.approx(held + 1, abs=2 if held > 100 else 0)
    assert data.train.tokens + data.validation.tokens == len(text) + 2
    if " " in text:
        assert text_of(data.train, data.tokenizer)[-2] in b" \n"


@pytest.mark.parametrize("kind", ["bytes", {"train": 300}])
def test_a_document_too_short_to_be_divided_is_named(tmp_path, kind):
    path = tmp_path / "a.txt"
    path.write_text("x")
    with pytest.raises(ConfigError, match=r"data\.validation: .*a\.txt is the only.*too little"):
        prepare(config(path, tokenizer=kind, validation=0.05), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    whole = prepare(config(path, tokenizer=kind), tmp_path / "cache")
    assert len(Loader(whole.train, 1).rows) == 1


def test_text_that_gives_no_token_is_named(tmp_path, monkeypatch):
    from lezero.data.tokenizer import _Bytes

    path = tmp_path / "a.txt"
    path.write_text("x")
    monkeypatch.setattr(_Bytes, "_encode", lambda self, text: [])
    with pytest.raises(ConfigError, match=r"data\.train: .*a\.txt: too little text.*1 token"):
        prepare(config(path), tmp_path / "cache")


def test_few_documents_still_give_both_parts(tmp_path):
    jsonl(tmp_path / "d.jsonl", {"text": "one"}, {"text": "two"}, {"text": "three"})
    for share in (0.0001, 0.9999):
        data = prepare(config(tmp_path, validation=share), tmp_path / "cache")
        assert len(data.train) > 0
        assert len(data.validation) > 0


def test_validation_files_are_kept_out_of_training(tmp_path):
    jsonl(tmp_path / "t.jsonl", {"text": "seen"}, {"text": "shared"})
    jsonl(tmp_path / "v.jsonl", {"text": "shared"})
    data = prepare(
        config(tmp_path / "t.jsonl", validation=[str(tmp_path / "v.jsonl")]), tmp_path / "cache"
    )
    assert data.train.tokens == len("seen") + 1
    assert data.validation.tokens == len("shared") + 1
    assert data.findings["left_out"] == {"duplicate": 1}


def test_duplicates_that_are_kept_do_not_bring_validation_files_into_training(tmp_path):
    jsonl(tmp_path / "t.jsonl", {"text": "kept"}, {"text": "shared"}, {"text": "kept"})
    jsonl(tmp_path / "v.jsonl", {"text": "shared"}, {"text": "shared"})
    files = {"validation": [str(tmp_path / "v.jsonl")], "duplicates": "keep"}
    data = prepare(config(tmp_path / "t.jsonl", **files), tmp_path / "cache")
    assert data.train.tokens == 2 * len("kept.")
    assert data.validation.tokens == 2 * len("shared.")
    assert data.findings["left_out"] == {"duplicate": 1}
    files["validation"] = [str(tmp_path / "t.jsonl")]
    with pytest.raises(ConfigError, match="is in the validation files"):
        prepare(config(tmp_path / "t.jsonl", **files), tmp_path / "cache")


def test_duplicates_are_skipped_kept_or_refused(tmp_path):
    jsonl(tmp_path / "d.jsonl", {"text": "same"}, {"text": "same"})
    tokens = {
        mode: prepare(config(tmp_path, duplicates=mode), tmp_path / "cache").train.tokens
        for mode in ("skip", "keep")
    }
    assert tokens == {"skip": 5, "keep": 10}
    with pytest.raises(FileError, match=r"line 2.*before.*data\.duplicates: skip"):
        prepare(config(tmp_path, duplicates="refuse"), tmp_path / "cache")


def test_nothing_usable_is_a_clear_error(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match=r"nothing to read.*empty file"):
        prepare(config(tmp_path), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_made_once_and_made_again_when_anything_changes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text")
    first = prepare(config(tmp_path), tmp_path / "cache")
    stamp = os.stat(first.folder).st_ino
    assert os.stat(prepare(config(tmp_path), tmp_path / "cache").folder).st_ino == stamp
    longer = prepare(config(tmp_path, sequence=16), tmp_path / "cache")
    assert longer.folder == first.folder  # rows are cut when read: no second copy
    assert longer.train.digest != first.train.digest
    path.write_text("other text")
    changed = prepare(config(tmp_path), tmp_path / "cache")
    assert changed.folder != first.folder
    loader = Loader(first.train, 1)
    with pytest.raises(ConfigError, match="would repeat or be skipped"):
        Loader(changed.train, 1).seek(loader.state())


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damaged_token_files_are_made_again(tmp_path, damage):
    (tmp_path / "a.txt").write_text("some text")
    data = prepare(config(tmp_path), tmp_path / "cache")
    digest, path = data.train.digest, data.folder / "train.tokens"
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    if damage == "flip":
        path.write_bytes(raw)
    elif damage == "truncate":
        path.write_bytes(raw[:-1])
    elif damage == "remove":
        path.unlink()
    else:
        (data.folder / "manifest.json").write_text("{}")
    again = prepare(config(tmp_path), tmp_path / "cache")
    assert again.train.digest == digest
    assert text_of(again.train, again.tokenizer)[:9] == [*b"some text"]


def test_a_large_vocabulary_takes_four_bytes(tmp_path, monkeypatch):
    from lezero.data.tokenizer import _Bytes

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(_Bytes, "vocab_size", 70_000)
    data = prepare(config(tmp_path), tmp_path / "cache")
    assert (data.folder / "train.tokens").stat().st_size == 2 * 4


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lezero.data.store.write_durable", full)
    with pytest.raises((FileError, OSError)):
        prepare(config(tmp_path), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("trouble", ["no folder", "full disk"])
def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path, monkeypatch, trouble):
    jsonl(tmp_path / "a.jsonl", {"text": "some words"}, {"text": "and more"})
    cache = tmp_path / "cache"
    if trouble == "no folder":
        cache.write_text("a file")
        reason = "File exists|Not a directory"
    else:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("lezero.data.store.Writer.add_text", full)
        reason = "No space left on device"
    monkeypatch.setenv("LEZERO_CACHE", str(cache))
    with pytest.raises(FileError, match=rf"{cache}/data \(({reason})\); .* set LEZERO_CACHE to"):
        prepare(config(tmp_path / "a.jsonl"))


def test_a_cache_that_is_a_file_is_told_before_a_run(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    for cache, told in ((tmp_path / "file", True), (tmp_path / "new" / "cache", False)):
        monkeypatch.setenv("LEZERO_CACHE", str(cache))
        caplog.clear()
        foresee_cache()
        assert ("`lz train` will refuse: set LEZERO_CACHE" in caplog.text) is told
        assert (f"({cache} is no folder)" in caplog.text) is told


def test_token_files_lie_where_everything_is_cached(tmp_path, monkeypatch):
    jsonl(tmp_path / "a.jsonl", {"text": "some words"}, {"text": "and more"})
    for name in ("LEZERO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    data = prepare(config(tmp_path / "a.jsonl"))
    assert data.folder.parent == tmp_path / "home" / ".cache" / "lezero" / "data"


def test_trained_tokenizer_comes_from_the_training_text_alone(tmp_path):
    jsonl(tmp_path / "t.jsonl", *({"text": f"apple banana {i}"} for i in range(20)))
    jsonl(tmp_path / "v.jsonl", {"text": "zebra zebra zebra zebra"})
    settings = {"validation": [str(tmp_path / "v.jsonl")], "tokenizer": {"train": 300}}
    data = prepare(config(tmp_path / "t.jsonl", **settings), tmp_path / "cache")
    assert data.tokenizer.vocab_size <= 300
    assert len(data.tokenizer.encode(" banana")) == 1
    assert len(data.tokenizer.encode(" zebra")) > 1
    data.tokenizer.save(tmp_path / "tok")
    reused = config(tmp_path / "t.jsonl", tokenizer={"folder": str(tmp_path / "tok")})
    assert prepare(reused, tmp_path / "cache").tokenizer.digest == data.tokenizer.digest
    (tmp_path / "tok" / "tokenizer.json").rename(tmp_path / "tok" / "wiki.json")
    named = config(tmp_path / "t.jsonl", tokenizer={"folder": str(tmp_path / "tok" / "wiki.json")})
    first = prepare(named, tmp_path / "cache")
    assert first.tokenizer.digest == data.tokenizer.digest
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    other = prepare(named, tmp_path / "cache")  # what ends a text is part of the cache's key
    assert other.tokenizer.eos == data.tokenizer.encode("b")[0]


def test_trained_tokenizer_comes_from_prompts_and_responses(tmp_path):
    pairs = [{"prompt": f"apple banana {i}", "response": f"cherry zebra {i}"} for i in range(20)]
    jsonl(tmp_path / "t.jsonl", *pairs)
    data = prepare(config(tmp_path / "t.jsonl", tokenizer={"train": 300}), tmp_path / "cache")
    assert [len(data.tokenizer.encode(word)) for word in (" banana", " zebra")] == [1, 1]


def test_python_docs_are_real_text_in_a_fixed_order():
    texts = python_docs()
    size = sum(len(text) for _, text in texts)
    print(f"python-docs: {len(texts)} documents, {size:,} characters")
    assert size > 1_500_000
    assert len({text for _, text in texts}) == len(texts)
    sources = [source for source, _ in texts]
    assert sources[0].startswith("python-docs:topic assert")
    assert "python-docs:argparse.py" in sources
    python_docs.cache_clear()


def test_gathering_never_imports_and_repeats_itself(monkeypatch):
    monkeypatch.setattr(
        corpus, "_modules", lambda root: [root / "json" / "tool.py", root / "this.py"]
    )
    first = [python_docs(), python_docs.cache_clear(), python_docs()]
    python_docs.cache_clear()
    assert first[0] == first[2]
    assert "this" not in sys.modules


def prepare_on_rank(folder):
    """Runs in each rank: what this rank sees, and the error of a second, bad config."""
    groups.join()
    data = prepare(config(folder), f"{folder}/cache")
    with pytest.raises(FileError) as caught:
        prepare(config(f"{folder}/missing"), f"{folder}/cache")
    first = next(Loader(data.train, 2, rank=groups.rank(), world=groups.world_size()))
    return data.train.digest, str(caught.value), first["tokens"].tolist()


def test_ranks_share_what_rank_0_made(tmp_path, ranks):
    (tmp_path / "a.txt").write_text("some text that is long enough for several rows")
    (one, error, first), (two, other, second) = ranks(2, prepare_on_rank, str(tmp_path))
    assert one == two
    assert error == other
    assert "missing: no such file" in error
    single = prepare(config(tmp_path), tmp_path / "cache")
    assert first + second == next(Loader(single.train, 2))["tokens"].tolist()
