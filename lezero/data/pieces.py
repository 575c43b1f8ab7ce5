"""Single tokens of a tokenizer: which are special, and which bytes the others are.

A byte-level piece is letters that stand for bytes (Radford et al. 2019, GPT-2); a tokenizer that
falls back to bytes, as Llama 2's, writes one as <0xE4>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class Pieces:
    """Of a tokenizer of the package `tokenizers`. special: text of special tokens, by id."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self.special: Mapping[int, str] = {
            int(token): str(one.content) for token, one in added.items() if one.special
        }
        decoder = b"" if inner.decoder is None else inner.decoder.__getstate__()
        self._bytes = {letter: byte for byte, letter in enumerate(byte_letters())}
        self._is_byte_level = b'"ByteLevel"' in decoder
        self._falls_back = b'"ByteFallback"' in decoder

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token that may be half a character; None where they are not known."""
        piece = self._inner.id_to_token(token)
        if piece is None:
            return None
        found = _FALLBACK.fullmatch(piece)
        if self._falls_back and found is not None:
            return bytes.fromhex(found[1])
        if self._is_byte_level and all(letter in self._bytes for letter in piece):
            return bytes(self._bytes[letter] for letter in piece)
        return None


def splits_words(inner: Any) -> bool:
    """Whether words are encoded apart and the same wherever they stand, as by byte-level BPE that
    puts no space before a text (GPT-2's and its heirs'); False where that is not known, and where
    an added token reaches across the space between words."""
    if any(_reaches(token) for token in inner.get_added_tokens_decoder().values()):
        return False
    first = [] if inner.normalizer is None else _flat(inner.normalizer, "normalizers")
    steps = [] if inner.pre_tokenizer is None else _flat(inner.pre_tokenizer, "pretokenizers")
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    split = any(s["type"] == "Split" or (s in levels and s.get("use_regex", True)) for s in steps)
    return (
        all(step["type"] == "NFC" for step in first)
        and {step["type"] for step in steps} <= {"ByteLevel", "Split", "Digits", "Punctuation"}
        and bool(levels)
        and split
        and all(s["behavior"] in ("Isolated", "Removed") for s in steps if s["type"] == "Split")
        and not any(step["add_prefix_space"] for step in levels)
    )


def _reaches(token: Any) -> bool:
    inside = token.content.strip() and any(letter.isspace() for letter in token.content)
    return bool(token.lstrip or token.rstrip or inside)


def _flat(part: Any, several: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer; `several`: where a sequence of them has its own."""
    found = json.loads(part.__getstate__())
    return list(found[several]) if found["type"] == "Sequence" else [found]


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte.

    Printable bytes stand for themselves; the others take the letters from U+0100 on, in order.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]
