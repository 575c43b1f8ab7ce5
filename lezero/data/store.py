"""Token files: what a corpus became, written once, mapped into memory by every rank.

A folder holds `manifest.json` (sealed, with the length and digest of each file), the tokenizer and,
for each part (train, validation): `tokens` (all texts as one stream, an end-of-text token after
each document), `pairs` (prompt, response, end of text, one after another) and `index` (start, first
token of the response, end of each pair). Tokens are uint16 where the vocabulary allows, else
uint32, little-endian; the index is int64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from lezero import __version__
from lezero.core.errors import CorruptError
from lezero.data.behind import Behind
from lezero.data.tokenizer import Tokenizer
from lezero.files.folder import cannot_write, read_small, write_durable
from lezero.files.sealed import seal, unseal

FORMAT = 1
PARTS = ("train", "validation")
IGNORED = -100
_CHECKED = 1 << 30


class Writer:
    """Appends the documents of one part to its files."""

    def __init__(self, folder: Path, part: str, tokenizer: Tokenizer) -> None:
        self.folder, self.part, self.tokenizer = folder, part, tokenizer
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._files: dict[str, IO[bytes]] = {}
        self._hashes: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        self._end = 0

    def __enter__(self) -> Self:
        for kind in ("tokens", "pairs", "index"):
            self._files[kind] = open(self.folder / f"{self.part}.{kind}", "xb")
            self._hashes[kind], self._sizes[kind] = hashlib.sha256(), 0
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        import os

        for file in self._files.values():
            if error is None:
                file.flush()
                os.fsync(file.fileno())
            file.close()

    @cached_property
    def _behind(self) -> Behind:
        return Behind(self.tokenizer)

    def add_text(self, text: str) -> None:
        last: list[int] = []
        for part in self.tokenizer.encode_parts(text):
            if last:
                self._append("tokens", np.array(last, self.dtype))
            last = part
        self._append("tokens", np.array([*last, self.tokenizer.eos], self.dtype))

    def add_pair(self, prompt: str, response: str) -> None:
        """The prompt is encoded alone, as it is where the model is asked, the response behind it:
        their tokens decode to both texts, one after the other."""
        asked = self.tokenizer.encode(prompt) if prompt else []
        answered = (self._behind if prompt else self.tokenizer).encode(response)
        tokens = [*asked, *answered, self.tokenizer.eos]
        entry = (self._end, self._end + len(asked), self._end + len(tokens))
        self._end = entry[2]
        self._append("pairs", np.array(tokens, self.dtype))
        self._append("index", np.array(entry, "<i8"))

    def files(self) -> dict[str, dict[str, Any]]:
        """Length and digest of each file, for the manifest."""
        return {
            f"{self.part}.{kind}": {"bytes": self._sizes[kind], "sha256": made.hexdigest()}
            for kind, made in self._hashes.items()
        }

    def _append(self, kind: str, values: np.ndarray) -> None:
        data = values.tobytes()
        try:
            self._files[kind].write(data)
        except OSError as error:
            raise cannot_write(self.folder / f"{self.part}.{kind}", error, len(data)) from error
        self._hashes[kind].update(data)
        self._sizes[kind] += len(data)


class TokenRows:
    """Rows of `sequence` tokens from one part of a token folder.

    First the text rows: row i holds tokens i·T … i·T + T − 1 of the stream and, as targets, the
    tokens one further; documents follow each other within a row, the last row is filled up. Then
    one row a pair: targets are the response and its end of text, the prompt carries no loss, and
    the rest of the row is filled up. A pair that is too long loses the beginning of its prompt
    first (a quarter of the row is kept) and then the end of its response.
    """

    def __init__(
        self,
        text: np.ndarray,
        pairs: np.ndarray,
        index: np.ndarray,
        sequence: int,
        eos: int,
        digest: str,
    ) -> None:
        self._text, self._pairs, self._index = text, pairs, index.reshape(-1, 3)
        self.sequence, self._eos, self.digest = sequence, eos, digest
        self._windows = -(-max(0, len(text) - 1) // sequence)

    def __len__(self) -> int:
        return self._windows + len(self._index)

    @property
    def tokens(self) -> int:
        """Tokens stored, those without loss included."""
        return len(self._text) + len(self._pairs)

    @property
    def cut(self) -> int:
        """Pairs that are longer than a row."""
        return int(np.count_nonzero(self._index[:, 2] - self._index[:, 0] > self.sequence + 1))

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens (T,) and targets (T,), int64; targets are -100 where nothing is to be learned."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if index < self._windows:
            start = index * self.sequence
            return self._filled(self._text[start : start + self.sequence + 1], 0)
        start, response, end = (int(v) for v in self._index[index - self._windows])
        room = self.sequence + 1
        if end - start > room:
            kept = max(room - (end - response), min(response - start, room // 4))
            start = response - kept
            end = min(end, start + room)
        return self._filled(self._pairs[start:end], max(0, response - start - 1))

    def _filled(self, tokens: np.ndarray, masked: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of one run of tokens; the first `masked` targets carry no loss."""
        inputs = np.full(self.sequence, self._eos, np.int64)
        targets = np.full(self.sequence, IGNORED, np.int64)
        count = len(tokens) - 1
        inputs[:count] = tokens[:-1]
        targets[masked:count] = tokens[1 + masked :]
        return inputs, targets


def write_manifest(folder: Path, body: dict[str, Any]) -> None:
    body = {"readable_from": "0.1.0", "writer": f"lezero {__version__}", **body}
    write_durable(folder / "manifest.json", seal(FORMAT, body))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a token folder whose files are all there and whole.

    Every byte is checked up to 1 GiB a folder, above that the lengths. Raises `CorruptError` or
    `FileError` naming the file.
    """
    where = str(folder / "manifest.json")
    manifest = unseal(read_small(where, where, 64 << 20), where, FORMAT, __version__)
    files = manifest["files"]
    whole = sum(entry["bytes"] for entry in files.values()) <= _CHECKED
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CorruptError(f"{path}: missing or of another length than it was written with")
        if whole:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != entry["sha256"]:
                raise CorruptError(f"{path}: its bytes do not match its digest")
    return manifest


def open_rows(folder: Path, manifest: dict[str, Any], part: str, sequence: int) -> TokenRows:
    """Maps one part of a token folder into memory."""
    dtype = np.dtype(manifest["dtype"])
    names = {kind: f"{part}.{kind}" for kind in ("tokens", "pairs", "index")}
    digests = [manifest["files"][name]["sha256"] for name in names.values()]
    return TokenRows(
        _mapped(folder / names["tokens"], dtype),
        _mapped(folder / names["pairs"], dtype),
        _mapped(folder / names["index"], np.dtype("<i8")),
        sequence,
        manifest["eos"],
        digest_of([FORMAT, sequence, manifest["tokenizer"], *digests]),
    )


def digest_of(parts: Iterable[object]) -> str:
    """A digest of a sequence of plain values."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")
