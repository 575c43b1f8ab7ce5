"""The tokenizer inside a GGUF file is converted once for each vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from lezero.core.errors import FileError
from lezero.models import gguf_tokenizer, gguf_vocabulary, packaged_gguf

pytest.importorskip("gguf")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def smollm2() -> Path:
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
