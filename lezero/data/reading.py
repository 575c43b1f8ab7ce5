"""Files to documents. What cannot be used is named and counted, and skipped or refused.

A text file is one document. A JSONL line is one document: the text field, or a prompt with its
response. A line that has the text field is text, whatever else it has.
"""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lezero.core.errors import ConfigError, FileError
from lezero.data import corpus
from lezero.data.config import DataConfig

TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
LINE_ENDINGS = (".jsonl", ".ndjson")
_NAMED = 20


@dataclass(frozen=True)
class Document:
    """One text, or a prompt (may be empty) whose response is `text`."""

    text: str
    source: str
    prompt: str | None = None


@dataclass
class Findings:
    """What was read and what was left out, for the log and the manifest."""

    files: int = 0
    documents: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)

    def bad(self, where: str, reason: str, detail: str = "", *, refuse: bool) -> None:
        """Counts one thing that cannot be used; `FileError` when it is to be refused."""
        line = f"{where}: {detail or reason}"
        if refuse:
            raise FileError(f"{line}. Repair or remove it, or set data.on_bad_file: skip")
        self.reasons[reason] += 1
        if len(self.named) < _NAMED:
            self.named.append(line)

    def to_json(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "documents": self.documents,
            "left_out": dict(self.reasons),
            "named": self.named,
        }

    def summary(self) -> str:
        """One line: how much was left out and why, with the first of them named."""
        counts = ", ".join(f"{n} x {reason}" for reason, n in self.reasons.most_common())
        return f"{sum(self.reasons.values())} left out ({counts}); the first: {self.named[0]}"


def find_files(names: Iterable[str], what: str) -> list[str]:
    """The files that `names` (files, folders, globs) stand for, each once, folders sorted.

    A folder gives its files with a text or JSONL ending, at any depth, hidden ones left out.
    Raises `FileError` when a name stands for nothing.
    """
    found: dict[str, str] = {}
    for name in names:
        if name == corpus.NAME:
            found.setdefault(name, name)
            continue
        here = os.path.expanduser(name)
        if os.path.isdir(here):
            paths = sorted(_walk(here))
            if not paths:
                endings = " ".join(TEXT_ENDINGS + LINE_ENDINGS)
                raise FileError(f"{what}: {name} holds no file that ends in {endings}")
        elif os.path.lexists(here):
            paths = [here]
        elif glob.has_magic(here):
            paths = sorted(p for p in glob.glob(here, recursive=True) if not os.path.isdir(p))
            if not paths:
                raise FileError(f"{what}: no file matches {name}")
        else:
            raise FileError(f"{what}: {name}: no such file or folder ({corpus.NAME} is built in)")
        for path in paths:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _walk(root: str) -> Iterator[str]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".")]
        if "train.index" in files:  # token files of an earlier run, in a cache among the texts
            names.clear()
            continue
        for name in files:
            if not name.startswith(".") and name.lower().endswith(TEXT_ENDINGS + LINE_ENDINGS):
                yield os.path.join(folder, name)


def read(paths: Iterable[str], config: DataConfig, findings: Findings) -> Iterator[Document]:
    """Every usable document of `paths`, in order."""
    refuse = config.on_bad_file == "refuse"
    for path in paths:
        findings.files += 1
        if path == corpus.NAME:
            for source, text in corpus.python_docs():
                findings.documents += 1
                yield Document(text, source)
            continue
        lines = path.lower().endswith(LINE_ENDINGS)
        if config.format != "auto":
            lines = config.format == "jsonl"
        try:
            found = _lines(path, config, findings) if lines else _text(path, config, findings)
            for document in found:
                findings.documents += 1
                yield document
        except OSError as error:
            detail = f"cannot be read ({error.strerror or error})"
            findings.bad(path, "unreadable file", detail, refuse=refuse)


def _text(path: str, config: DataConfig, findings: Findings) -> Iterator[Document]:
    refuse = config.on_bad_file == "refuse"
    with open(path, "rb") as file:
        data = file.read(config.max_file_bytes + 1)
    if len(data) > config.max_file_bytes:
        detail = f"larger than {config.max_file_bytes:,} bytes; split it, or use JSONL"
        findings.bad(path, "file too large", detail, refuse=refuse)
        return
    text = _decode(data, path, findings, refuse=refuse)
    if text is not None and not text.strip():
        findings.bad(path, "empty file", refuse=refuse)
    elif text is not None:
        yield Document(text, path)


def _decode(data: bytes, where: str, findings: Findings, *, refuse: bool) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "no UTF-8"
        detail = f"{kind} text (byte {error.start:,}); save it as UTF-8"
        findings.bad(where, "not UTF-8", detail, refuse=refuse)
        return None


def _lines(path: str, config: DataConfig, findings: Findings) -> Iterator[Document]:
    refuse = config.on_bad_file == "refuse"
    usable, number = False, 0
    with open(path, "rb") as file:
        while line := file.readline(config.max_line_bytes + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > config.max_line_bytes:
                while line and not line.endswith(b"\n"):
                    line = file.readline(1 << 20)
                detail = f"longer than data.max_line_bytes ({config.max_line_bytes:,})"
                findings.bad(where, "line too long", detail, refuse=refuse)
                continue
            if line.strip():
                document = _record(line, where, config, findings)
                usable = usable or document is not None
                if document is not None:
                    yield document
    if not usable and number == 0:
        findings.bad(path, "empty file", refuse=refuse)


def _record(line: bytes, where: str, config: DataConfig, findings: Findings) -> Document | None:
    refuse = config.on_bad_file == "refuse"
    text = _decode(line, where, findings, refuse=refuse)
    if text is None:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        findings.bad(where, "bad JSON", f"bad JSON ({error})", refuse=refuse)
        return None
    if not isinstance(record, dict):
        detail = f"a JSON object is needed, this is a {type(record).__name__}"
        findings.bad(where, "no JSON object", detail, refuse=refuse)
        return None
    pair = (config.prompt_field, config.response_field)
    needed = (config.text_field,) if config.text_field in record else pair
    missing = [name for name in needed if name not in record]
    if missing:
        detail = f"has neither '{config.text_field}' nor {' and '.join(map(repr, pair))}"
        findings.bad(where, "missing field", detail, refuse=refuse)
        return None
    values = [record[name] for name in needed]
    for name, value in zip(needed, values, strict=True):
        if not isinstance(value, str):
            detail = f"'{name}' is a {type(value).__name__}, not text"
            findings.bad(where, "field is not text", detail, refuse=refuse)
            return None
        if any("\ud800" <= c <= "\udfff" for c in value):
            findings.bad(where, "broken Unicode", f"'{name}' is broken Unicode", refuse=refuse)
            return None
    if not values[-1].strip():
        findings.bad(where, "empty text", f"'{needed[-1]}' is empty", refuse=refuse)
        return None
    if len(values) == 1:
        return Document(values[0], where)
    return Document(values[1], where, prompt=values[0])


def nothing_usable(what: str, findings: Findings) -> ConfigError:
    """The error for data without a single usable document."""
    why = findings.summary() if findings.reasons else "every document was held out"
    return ConfigError(f"{what}: nothing to read: {why}")
