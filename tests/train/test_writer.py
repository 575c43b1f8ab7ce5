"""What writes a continuation, opened from a file."""

from __future__ import annotations

from types import SimpleNamespace

from lezero.train import writer


def test_a_gguf_file_ends_at_every_token_it_names_and_an_empty_prompt_starts_with_the_first(
    monkeypatch,
):
    found = SimpleNamespace(eos_token_id=2)
    model = SimpleNamespace(eval=lambda: "model")
    monkeypatch.setattr(writer, "open_model", lambda place, dtype: (model, None))
    monkeypatch.setattr(writer, "gguf_tokenizer", lambda place: found)
    monkeypatch.setattr(writer, "gguf_end_tokens", lambda place: frozenset([1, 2, 7]))
    assert writer.open_writer("a.gguf").stop == (2, 1, 7)
