"""What is held out is about the share of the text that was asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lezero.data import prepare
from lezero.data.build import Data
from tests.data.test_build import config, jsonl, text_of


def share_of(data: Data) -> float:
    assert data.validation is not None
    assert data.findings["tokens"] == {
        "train": data.train.tokens,
        "validation": data.validation.tokens,
    }
    return data.validation.tokens / (data.train.tokens + data.validation.tokens)


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
        text = bytes(token for token in text_of(data.validation, data.tokenizer) if token < 256)
        found.append(set(text.split(b"document ")))
    assert len(found[0] ^ found[1]) <= 2


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
