"""What a folder says of how its model's tokens are chosen: heeded, named, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lezero.core.errors import FileError
from lezero.data.special import CHOOSING
from lezero.serve.generation_config import read_generation

ACTING: dict[str, Any] = {
    **{"suppress_tokens": [3], "begin_suppress_tokens": [3], "bad_words_ids": [[3]]},
    **{"no_repeat_ngram_size": 2, "min_length": 5, "min_new_tokens": 1, "num_beams": 4},
    **{"forced_bos_token_id": 0, "forced_eos_token_id": [2], "sequence_bias": [[[3], -1.0]]},
    **{"exponential_decay_length_penalty": [5, 1.1], "encoder_repetition_penalty": 0.9},
    **{"guidance_scale": 1.5, "stop_strings": "x", "min_new_tokens ": 1, "penalty_alpha": 0.6},
}
INERT: dict[str, Any] = {
    **{"suppress_tokens": None, "bad_words_ids": [], "no_repeat_ngram_size": 0, "min_length": 0},
    **{"num_beams": 1, "sequence_bias": {}, "encoder_repetition_penalty": 1.0},
    **{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "max_new_tokens": 9},
    **{"eos_token_id": [1, 2], "repetition_penalty": 1, "transformers_version": "4"},
}


def folder(root: Path, said: Any, name: str = "generation_config.json") -> Path:
    (root / "config.json").write_text("{}")
    (root / name).write_text(said if isinstance(said, str) else json.dumps(said))
    return root


def test_nothing_is_said(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing", folder(tmp_path, INERT)):
        found = read_generation(place)
        assert (found.repetition_penalty, found.unheeded) == (1.0, ())


def test_what_acts_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = read_generation(folder(tmp_path, {**ACTING, "repetition_penalty": 1.05}))
    assert found.repetition_penalty == 1.05
    assert set(found.unheeded) == set(ACTING) - {"min_new_tokens "}
    assert {*found.unheeded, "repetition_penalty"} <= set(CHOOSING)  # what a saved model keeps
    found.tell()
    (warned,) = [record.message for record in caplog.records]
    assert all(name in warned for name in found.unheeded)
    assert "generation_config.json" in warned


def test_without_the_file_config_json_counts_as_in_transformers(tmp_path: Path) -> None:
    said = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    found = read_generation(folder(tmp_path, said, "config.json"))
    assert (found.repetition_penalty, found.unheeded) == (1.2, ("no_repeat_ngram_size",))
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_generation(tmp_path).repetition_penalty == 1.0


@pytest.mark.parametrize(
    "value", ["1.05", True, 0, -1, 1e9, float("nan"), float("inf"), [1.05], {}, 10**300]
)
def test_a_penalty_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(FileError, match=r"config\.json: repetition_penalty: got .*0\.01 to 100"):
        read_generation(folder(tmp_path, {"repetition_penalty": value}))


@pytest.mark.parametrize("said", ["{", "[]", "[" * 10**5, '{"repetition_penalty": ' + "9" * 5000])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, said: str) -> None:
    with pytest.raises(FileError, match=r"generation_config\.json"):
        read_generation(folder(tmp_path, said))


def test_nonsense_among_what_is_not_heeded_is_named(tmp_path: Path) -> None:
    said = {"min_length": "5", "num_beams": [2], "suppress_tokens": "x" * 10**6}
    found = read_generation(folder(tmp_path, said))
    assert set(found.unheeded) == set(said)
