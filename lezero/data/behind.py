"""Texts that go on where another one stops, as a response does behind its prompt.

Some tokenizers (Llama 2's, Mistral's first) put a space before every text that they are given. Such
a text encoded by itself would carry a space that is not in it. So it is encoded behind a sign whose
tokens are taken off again.
"""

from __future__ import annotations

from lezero.data.tokenizer import Tokenizer

_SIGNS = ("\n", ".")
"""What a vocabulary hardly joins to the text behind it."""


class Behind:
    """Encodes a text for the place behind another one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        found = [(sign, tokenizer.encode(sign)) for sign in _SIGNS]
        # One that the tokenizer changes (T5's makes a space of a line end) tells nothing.
        found = [
            (sign, tokens) for sign, tokens in found if tokenizer.decode(tokens).endswith(sign)
        ]
        self._signs: list[tuple[str, list[int]]] = []
        alone = tokenizer.encode("a")
        for sign, tokens in found:
            behind = _after(tokens, tokenizer.encode(sign + "a"))
            if behind is not None and behind != alone:
                self._signs = found

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, which stands behind another text."""
        for sign, tokens in self._signs:
            found = _after(tokens, self._tokenizer.encode(sign + text))
            if found is not None:
                return found
        return self._tokenizer.encode(text)


def _after(first: list[int], tokens: list[int]) -> list[int] | None:
    """What comes after `first`; None where the text was joined to it."""
    return tokens[len(first) :] if tokens[: len(first)] == first else None
