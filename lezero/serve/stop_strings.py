"""Text up to the first stop string, and nothing of it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string.

    What may be the beginning of one is held back until it is certain. Of stop strings that overlap
    the one that is complete first counts, and of those complete at once the longest. How the text
    is divided into pieces changes nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        """The stop string that ended the text."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(stops)
        self._held = ""

    def add(self, piece: str) -> str:
        """The text that can be passed on; nothing more once a stop string was found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        for end, letter in enumerate(piece, len(self._held) + 1):
            for number, stop in enumerate(self._stops):
                matched = _advance(stop, self._borders[number], self._matched[number], letter)
                self._matched[number] = matched
                if matched == len(stop):
                    self.found, self._held = stop, ""
                    return text[: end - matched]
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _advance(stop: str, borders: list[int], matched: int, letter: str) -> int:
    """Letters of `stop` that match after one more letter (Knuth, Morris and Pratt 1977)."""
    while matched and stop[matched] != letter:
        matched = borders[matched - 1]
    return matched + (stop[matched] == letter)


def _borders(stop: str) -> list[int]:
    """For each beginning of `stop`: the longest shorter beginning that it ends with."""
    borders = [0]
    for letter in stop[1:]:
        borders.append(_advance(stop, borders, borders[-1], letter))
    return borders
