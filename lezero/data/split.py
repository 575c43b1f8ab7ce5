"""Which documents are held out, and where documents are divided.

[Note: a share of the text]
Documents are chosen by numbers that come from their words and the seed, so the choice does not
change with their order, nor much with their number, and copies of a document go together. A share
of the documents is about that share of the text where there are many; where what is held out is
more than twice the share of the text, or less than half of it, they are chosen by their numbers and
their lengths; and where that cannot give it either, as with a few books, each is divided near its
end. Prompts with responses are not.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterator

from lezero.core.errors import ConfigError, FileError
from lezero.data.config import DataConfig
from lezero.data.reading import Document, Findings, read

TRAIN, HELD, DROPPED = 0, 1, 2
_PART = 1 << 20


class Split:
    """Decides for each document: training, held out or dropped."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.share = config.validation if isinstance(config.validation, float) else 0.0
        self._seen: set[int] = set()
        self._held: set[int] = set()  # of the validation files
        self._places, self._sizes = array("d"), array("q")
        self._pairs = array("b")
        self._last_pair = ""

    def scan(self, paths: list[str], part: int | None, findings: Findings) -> Iterator[int]:
        """The part of each document of `paths`; `part` None divides by share."""
        for document in read(paths, self.config, findings):
            prompt = document.prompt or ""
            kind = "text" if document.prompt is None else len(prompt)
            number = _number(f"{self.config.seed}\0{kind}\0{prompt}", document.text)
            held = part is None and number in self._held
            again = number in self._seen and self.config.duplicates != "keep"
            self._seen.add(number)
            if part == HELD:
                self._held.add(number)
            if part is None:
                self._places.append(number / 2**64)
                self._sizes.append(len(document.text) + len(document.prompt or ""))
                self._pairs.append(document.prompt is not None)
            if held or again:
                refuse = self.config.duplicates == "refuse"
                said = "is in the validation files" if held else "occurred before"
                where = document.source
                findings.bad(
                    where, "duplicate", said, refuse=refuse, file=document.file, option="duplicates"
                )
                yield DROPPED
                continue
            if part is None and document.prompt is not None:
                self._last_pair = document.source
            yield part if part is not None else (HELD if self._places[-1] < self.share else TRAIN)

    def settle(self, documents: list[int]) -> float:
        """Sees to it that about the share of the text is held out, and that something is left.

        Changes the parts of `documents`, those that `scan` gave without a part. Where they are to
        be divided near their ends, the share to cut off is returned, else 0. A single pair of
        prompt and response cannot be divided: that is a `ConfigError`.
        """
        used = [i for i, part in enumerate(documents) if part != DROPPED]
        if self.share <= 0 or not used:
            return 0.0
        used.sort(key=lambda i: (self._places[i], i))
        first, last = self._places[used[0]], self._places[used[-1]]
        if first == last:  # a single document, or copies of it
            if self._pairs[used[0]]:
                raise ConfigError(
                    f"data.validation: got {self.share:g}, but {self._last_pair} is the only "
                    "document, and a prompt with its response cannot be divided; give data.train "
                    "more pairs, or set data.validation to 0 or to files"
                )
            self._put(TRAIN, first, documents, used)
            return self.share
        if HELD not in documents:
            self._put(HELD, first, documents, used)
        elif TRAIN not in documents:
            self._put(TRAIN, last, documents, used)
        if self._is_near(documents, used):
            return 0.0
        chosen = self._by_length(used)
        if self._is_near(chosen, used):
            documents[:] = [chosen.get(i, DROPPED) for i in range(len(documents))]
            return 0.0
        divided = sum(int(self._sizes[i] * self.share) for i in used if not self._pairs[i])
        if 2 * divided < self.share * sum(self._sizes[i] for i in used):
            return 0.0
        for i in used:
            documents[i] = TRAIN
        return self.share

    def _put(self, part: int, place: float, documents: list[int], used: list[int]) -> None:
        """The document of this place, and all its copies, into `part`."""
        for i in used:
            if self._places[i] == place:
                documents[i] = part

    def _is_near(self, parts: list[int] | dict[int, int], used: list[int]) -> bool:
        """Whether both parts of the text are at least half of what was asked for, and what is held
        out at most twice."""
        total = sum(self._sizes[i] for i in used)
        held = sum(self._sizes[i] for i in used if parts[i] == HELD)
        most = min(2 * self.share, (1 + self.share) / 2)
        return self.share / 2 * total <= held <= most * total

    def _by_length(self, used: list[int]) -> dict[int, int]:
        """Document → part: in the order of their numbers, those that fit."""
        total = sum(self._sizes[i] for i in used)
        wanted, held = self.share * total, 0
        parts = dict.fromkeys(used, TRAIN)
        for _, copies in itertools.groupby(used, self._places.__getitem__):
            together = list(copies)
            after = held + sum(self._sizes[i] for i in together)
            if held < wanted and after <= 2 * wanted and after < total:
                parts |= dict.fromkeys(together, HELD)
                held = after
        return parts


def _number(before: str, text: str) -> int:
    digest = hashlib.blake2b(before.encode(), digest_size=8)
    for start in range(0, len(text), _PART):  # a text may take a third of the memory
        digest.update(text[start : start + _PART].encode())
    return int.from_bytes(digest.digest(), "big")


def select(
    documents: Iterator[Document], parts: list[int], part: int, cut: float
) -> Iterator[Document]:
    """The documents of a part; cut: the share that is held out of the end of each."""
    alone = parts.count(TRAIN) == 1
    for document, belongs in itertools.zip_longest(documents, parts):
        if document is None or belongs is None:
            raise FileError("data: the files changed while they were read; start again")
        if cut and belongs == TRAIN and document.prompt is None:
            at = _place_of_cut(document, cut, alone)
            text = document.text[:at] if part == TRAIN else document.text[at:]
            if text:
                yield Document(text, document.source)
        elif belongs == part:
            yield document


def _place_of_cut(document: Document, share: float, alone: bool) -> int:
    """Where the held-out end of a document begins. Neither part is empty, but of one among others
    that is too short.

    That is the line end next to the place that leaves `share` of the characters, at most a quarter
    of the share away and rather before it than after; without a line, a space; else the place.
    """
    text = document.text
    if not alone and int(len(text) * share) < 1:
        return len(text)
    if len(text) < 2:
        raise ConfigError(
            f"data.validation: {document.source} is the only document and has {len(text)} "
            "character, too little text to hold a part of it out; give data.train more text, or "
            "set data.validation to 0 or to files"
        )
    place = min(max(int(len(text) * (1 - share)), 1), len(text) - 1)
    reach = int(len(text) * share / 4)
    first, last = max(place - reach, 1), min(place + reach, len(text) - 1)
    for mark in ("\n", " "):
        before = text.rfind(mark, first - 1, place) + 1
        after = text.find(mark, place, last) + 1
        if before or after:
            return before or after
    return place
