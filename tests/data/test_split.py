"""What is held out is about the share of the text that was asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lezero.core.errors import ConfigError, FileError
from lezero.data import build, prepare
from lezero.data.build import Data
from lezero.data.reading import Document
from lezero.data.split import TRAIN, select
from lezero.data.store import TokenRows
from tests.data.test_build import config, jsonl, text_of


def share_of(data: Data) -> float:
    assert data.validation is not None
    assert data.findings["tokens"] == {
        "train": data.train.tokens,
        "validation": data.validation.tokens,
    }
    return data.validation.tokens / (data.train.tokens + data.validation.tokens)


def documents_of(data: Data, rows: TokenRows | None) -> list[str]:
    assert rows is not None
    tokens = text_of(rows, data.tokenizer)
    assert tokens[-1] == data.tokenizer.eos
    ends = [token if token < 256 else 0 for token in tokens]
    return bytes(ends).decode().split("\0")[:-1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lengths", [(100_000, 400), (400, 70_000, 9_000), (60_000, 60_000)])
def test_a_few_books_are_divided_near_their_ends(
    lengths: tuple[int, ...], seed: int, tmp_path: Path
) -> None:
    for number, length in enumerate(lengths):
        (tmp_path / f"{number}.txt").write_text(f"{number} word\n" * (length // 7))
    data = prepare(config(tmp_path, validation=0.05, seed=seed), tmp_path / "cache")
    assert share_of(data) == pytest.approx(0.05, abs=0.005)
    assert data.validation is not None
    ends = 2 * len(lengths)  # a token ends each part of each
    kept = sum(length // 7 * 7 for length in lengths)
    assert kept <= data.train.tokens + data.validation.tokens <= kept + ends


def test_a_long_document_among_many_is_not_all_that_is_held_out(tmp_path: Path) -> None:
    for seed in range(6):
        texts = [{"text": f"document {i:03}"} for i in range(200)] + [{"text": "long " * 2000}]
        jsonl(tmp_path / "d.jsonl", *texts)
        data = prepare(config(tmp_path, validation=0.05, seed=seed), tmp_path / "cache")
        assert 0.02 < share_of(data) < 0.11


def test_documents_of_about_one_length_are_chosen_by_their_words_alone(tmp_path: Path) -> None:
    found = []
    for count in (300, 301):
        jsonl(tmp_path / "d.jsonl", *({"text": f"document {i:04}"} for i in range(count)))
        data = prepare(config(tmp_path, validation=0.1, sequence=14), tmp_path / "cache")
        assert data.validation is not None
        found.append(set(documents_of(data, data.validation)))
    assert len(found[0] ^ found[1]) <= 2


def test_another_seed_holds_out_other_documents(tmp_path: Path) -> None:
    jsonl(tmp_path / "d.jsonl", *({"text": f"document {i:04}"} for i in range(200)))
    held = []
    for seed in (0, 1):
        data = prepare(config(tmp_path, validation=0.1, seed=seed), tmp_path / "cache")
        held.append(set(documents_of(data, data.validation)))
    assert len(held[0] - held[1]) > 5


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.9999])
def test_copies_that_are_kept_are_held_out_together_or_not_at_all(
    tmp_path: Path, share: float
) -> None:
    texts = [f"{i:02}" * 50 for i in range(12)]
    jsonl(tmp_path / "d.jsonl", *({"text": text} for text in texts + texts[:6]))
    for seed in range(4):
        asked = config(tmp_path, validation=share, duplicates="keep", seed=seed)
        data = prepare(asked, tmp_path / "cache")
        train, held = documents_of(data, data.train), documents_of(data, data.validation)
        assert not set(train) & set(held)


def test_a_document_and_its_copies_are_divided_at_one_place(tmp_path: Path) -> None:
    jsonl(tmp_path / "d.jsonl", *[{"text": "0123456789"}] * 3)
    for share, at in ((0.2, 8), (0.79, 2)):
        asked = config(tmp_path, validation=share, duplicates="keep")
        data = prepare(asked, tmp_path / "cache")
        assert documents_of(data, data.train) == ["0123456789"[:at]] * 3
        assert documents_of(data, data.validation) == ["0123456789"[at:]] * 3
    jsonl(tmp_path / "d.jsonl", *[{"prompt": "a", "response": "b"}] * 3)
    with pytest.raises(ConfigError, match="is the only document"):
        prepare(asked, tmp_path / "cache")


@pytest.mark.parametrize("copies", [1, 2])
def test_one_long_document_is_no_reason_to_divide_any(tmp_path: Path, copies: int) -> None:
    texts = ["long" * 750, *[f"{i:03}" * 33 for i in range(30)] * copies]
    jsonl(tmp_path / "d.jsonl", *({"text": text} for text in texts))
    for seed in range(4):  # the long one is the first to be chosen with some of them
        asked = config(tmp_path, validation=0.05, duplicates="keep", seed=seed)
        data = prepare(asked, tmp_path / "cache")
        train, held = documents_of(data, data.train), documents_of(data, data.validation)
        assert sorted(train + held) == sorted(texts)
        assert not set(train) & set(held)


def test_a_document_of_the_validation_files_is_held_out_once(tmp_path: Path) -> None:
    jsonl(tmp_path / "v.jsonl", {"text": "twice"}, {"text": "once"}, {"text": "twice"})
    jsonl(tmp_path / "t.jsonl", {"text": "to train on"})
    asked = config(tmp_path / "t.jsonl", validation=[str(tmp_path / "v.jsonl")])
    data = prepare(asked, tmp_path / "cache")
    assert documents_of(data, data.validation) == ["twice", "once"]
    assert data.findings["left_out"] == {"duplicate": 1}


@pytest.mark.parametrize("read", [1, 3])
def test_files_that_change_while_they_are_read_are_told(read: int) -> None:
    documents = iter([Document("text", "a file")] * read)
    with pytest.raises(FileError, match="the files changed while they were read"):
        list(select(documents, [TRAIN, TRAIN], TRAIN, 0.0))


def test_as_many_documents_in_another_order_are_no_longer_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what was read as validation the first time would be trained on the second time."""
    documents = [{"text": f"document {n} of many"} for n in range(200)]
    jsonl(tmp_path / "d.jsonl", *documents)
    real, opened = build.Writer, list[str]()

    def writer(folder: Path, name: str, tokenizer: Any) -> Any:
        opened.append(name)
        if name == "validation":
            jsonl(tmp_path / "d.jsonl", *documents[1:], {"text": "document 999 of all"})
        return real(folder, name, tokenizer)

    monkeypatch.setattr(build, "Writer", writer)
    with pytest.raises(FileError, match="the files changed while they were read; start again"):
        prepare(config(tmp_path / "d.jsonl", validation=0.1), tmp_path / "cache")
    assert opened == ["train", "validation"]
    assert not list((tmp_path / "cache").glob("tokens-*"))
    monkeypatch.undo()
    data = prepare(config(tmp_path / "d.jsonl", validation=0.1), tmp_path / "cache")
    parts = documents_of(data, data.train), documents_of(data, data.validation)
    assert not set(parts[0]) & set(parts[1])


def test_pairs_of_unequal_length_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    pairs: list[dict[str, Any]] = [{"prompt": "a", "response": "b" * n} for n in (900, 700)]
    jsonl(tmp_path / "d.jsonl", *pairs)
    with caplog.at_level("WARNING", "lezero"):
        data = prepare(config(tmp_path, validation=0.05, sequence=1000), tmp_path / "cache")
    assert share_of(data) > 0.4
    assert "% of the tokens are held out, where 5% were asked for" in caplog.text


def test_a_pair_is_never_the_duplicate_of_a_text(tmp_path: Path) -> None:
    words = ["a few words", "other words here"]
    lines: list[dict[str, str]] = [{"text": text} for text in words]
    lines += [{"prompt": prompt, "response": words[0]} for prompt in ("None", "", "text", "a")]
    lines += [{"prompt": "a few", "response": " words"}, {"prompt": "a", "response": " few words"}]
    jsonl(tmp_path / "a.jsonl", *lines)
    data = prepare(config(tmp_path / "a.jsonl"), tmp_path / "cache")
    assert data.findings["documents"] == len(lines)
    assert data.findings["left_out"] == {}
