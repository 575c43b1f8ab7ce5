"""What writes a continuation, opened from a file."""

from __future__ import annotations

from types import SimpleNamespace

from lezero.data.tokenizer import bytes_tokenizer
from lezero.train import writer


def test_a_folder_ends_at_the_tokenizers_own_end_too_as_in_the_engine(tmp_path, monkeypatch):
    """A fine-tune on turns whose config still names the end of a text."""
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    model = SimpleNamespace(eval=lambda: "model")
    monkeypatch.setattr(writer, "open_model", lambda place, dtype: (model, tmp_path))
    assert writer.open_writer(str(tmp_path)).stop == (256, 2)


def test_a_gguf_file_ends_at_every_token_it_names_and_an_empty_prompt_starts_with_the_first(
    monkeypatch,
):
    found = SimpleNamespace(eos_token_id=2)
    model = SimpleNamespace(eval=lambda: "model")
    monkeypatch.setattr(writer, "open_model", lambda place, dtype: (model, None))
    monkeypatch.setattr(writer, "gguf_tokenizer", lambda place: found)
    monkeypatch.setattr(writer, "gguf_end_tokens", lambda place: frozenset([1, 2, 7]))
    assert writer.open_writer("a.gguf").stop == (2, 1, 7)
