"""Which tokens of a GGUF file end an answer."""

from pathlib import Path

import pytest

from lezero.models import Transformer, gguf_end_tokens
from tests.models.test_gguf import CONFIG, write


@pytest.mark.parametrize(
    ("ids", "ends"),
    [({}, set()), ({"eos": 3, "eot": 5, "eom": 1999}, {3, 5, 1999}), ({"eos": 3, "eot": 3}, {3})],
)
def test_the_ends_of_text_turn_and_message_are_told(
    ids: dict[str, int], ends: set[int], tmp_path: Path
) -> None:
    said = {f"tokenizer__ggml__{kind}_token_id": token for kind, token in ids.items()}
    assert gguf_end_tokens(write(tmp_path / "a.gguf", Transformer(CONFIG), **said)) == ends
    none = {f"tokenizer__ggml__{kind}_token_id": (1 << 32) - 1 for kind in ("eot", "eom")}
    file = write(
        tmp_path / "b.gguf", Transformer(CONFIG), **none, tokenizer__ggml__eos_token_id=2000
    )
    assert gguf_end_tokens(file) == set()
