"""Tokens into text as they come: never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
_LONG = 16
_CONTEXT = 8
_LONGEST = 4
"""Tokens of one character: no more than its bytes in UTF-8."""


class Detokenizer:
    """Gives the text of each token as soon as it is certain.

    decode: tokens to text, of any tokenizer; invalid UTF-8 becomes U+FFFD. before: tokens that the
    text goes on from (the end of the prompt), whose text is not given, but for half a character
    that the first tokens complete.

    The pieces and `finish` together are `decode` of all tokens. (One exception: a tokenizer that
    falls back to bytes, as Llama 2's, decodes a valid character anew as U+FFFD when invalid bytes
    follow it at once; here it stays.)

    [Note: the window] Decoding all tokens at each new one would take quadratic time, and a token
    alone may decode otherwise than after others (many decoders drop a leading space). So each new
    token is decoded behind those of the last piece that was given, and those behind it that are
    held back. A window begins where a piece began and a piece ends with a whole character, so no
    character is cut. The first one, of the prompt's last tokens, is widened to where a character
    begins: tokenizers that fall back to bytes decode a whole run of them as U+FFFD when its first
    ones are the rest of a character. A long run of invalid bytes is given up to a token where a cut
    changes nothing: four bytes later a UTF-8 decoder has forgotten where it began.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(before[_start_of_window(decode, before) :])
        self._known = len(self._window)
        self._given = decode(self._window) if self._window else ""

    def add(self, token: int) -> str:
        """The text that is certain now and was not before; often one word, sometimes nothing."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(_BROKEN):
            return self._give(text, len(self._window))
        if len(self._window) - self._known > _LONG:
            return self._give_broken(text)
        return ""

    def finish(self) -> str:
        """What was held back; half a character is U+FFFD now."""
        text = self._decode(self._window) if self._window else ""
        return self._give(text, len(self._window))

    def _give(self, text: str, end: int) -> str:
        """Gives what is new in `text`, the text of the window's first `end` tokens."""
        given, left = self._given, self._known
        if given.endswith(_BROKEN) and not text.startswith(given):
            # Half a character is whole now. The piece begins within the known tokens: they stay.
            given, left = self._before_half(text), 0
        piece = text[len(given) :]
        if piece:
            del self._window[:left]
            self._known = end - left
            self._given = self._decode(self._window[: self._known])
        elif len(self._window) - self._known > _LONG:
            # Tokens without text, as special ones; what follows is decoded behind the known ones.
            del self._window[self._known :]
        return piece

    def _before_half(self, text: str) -> str:
        """The beginning of `text` that the known tokens had before they ended with half of what is
        a character now."""
        for known in range(self._known - 1, max(self._known - _LONGEST, -1), -1):
            given = self._decode(self._window[:known]) if known else ""
            if not given.endswith(_BROKEN) and text.startswith(given):
                return given
        return self._given.rstrip(_BROKEN)

    def _give_broken(self, text: str) -> str:
        """Gives the beginning of a long run that may still end with half a character."""
        middle = len(self._window) - _LONG // 2
        first, rest = self._decode(self._window[:middle]), self._decode(self._window[middle:])
        if len(rest) < _LONG // 2 or first + rest != text:
            return ""
        return self._give(first, middle)


def _start_of_window(decode: Callable[[list[int]], str], before: Sequence[int]) -> int:
    """Where the last tokens begin with a whole character; any place where none begins near."""
    latest = max(0, len(before) - _CONTEXT)
    for start in range(latest, max(0, latest - _LONG), -1):
        if _begins_whole(decode, before[start : start + _LONGEST]):
            return start
    return latest if latest > _LONG else 0


def _begins_whole(decode: Callable[[list[int]], str], tokens: Sequence[int]) -> bool:
    """Whether tokens begin with a whole character; also for U+FFFD written as bytes, whose text
    gets shorter when it is complete."""
    length = 0
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[:end]))
        if len(text) < length or (text and text[0] != _BROKEN):
            return True
        length = len(text)
    return False
