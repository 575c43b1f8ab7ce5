"""Files to documents. What cannot be used is named and counted, and skipped or refused.

A text file is one document. A JSONL line is one document: the text field, or a prompt with its
response. A line that has the text field is text, whatever else it has.
"""

from __future__ import annotations

import glob
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lezero.core.errors import ConfigError, FileError
from lezero.core.paths import expand_home
from lezero.data import corpus
from lezero.data.config import DataConfig

TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
LINE_ENDINGS = (".jsonl", ".ndjson")
_PACKED = {
    b"PAR1": "a Parquet file; write its texts as .jsonl",
    b"\x1f\x8b": "packed by gzip; unpack it",
    b"PK\x03\x04": "a zip archive, as .docx and .xlsx are; unpack it, or write its texts as .jsonl",
    b"\x28\xb5\x2f\xfd": "packed by zstd; unpack it",
}
_NAMED, _KEPT = 20, 10_000
_RUN = {"config.yaml", "data.json", "metrics.jsonl"}
"""By these files a folder is known as that of a run (`lezero/train/run_folder.py`)."""
_WRITTEN_BY_RUN = {"metrics.jsonl", "checkpoints", "tokenizer", "tensorboard"}


@dataclass(frozen=True)
class Document:
    """One text, or a prompt (may be empty) whose response is `text`."""

    text: str
    source: str
    prompt: str | None = None
    file: str = ""


@dataclass
class Place:
    """How often one thing is wrong in one file, and the first time in words."""

    count: int
    first: str


@dataclass
class Findings:
    """What was read and what was left out, for the log and the manifest."""

    files: int = 0
    documents: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    places: dict[str, dict[str, Place]] = field(default_factory=dict)
    """Reason → file → what is wrong there; at most `_KEPT` files a reason are named."""
    both: Place | None = None
    """Lines of JSONL with a text and a pair."""

    def bad(
        self,
        where: str,
        reason: str,
        detail: str = "",
        *,
        refuse: bool,
        file: str,
        option: str = "on_bad_file",
    ) -> None:
        """Counts one thing of `file` that cannot be used; `FileError` when it is to be refused,
        as the `option` of the data says."""
        line = f"{where}: {detail or reason}"
        if refuse:
            raise FileError(f"{line}. Repair or remove it, or set data.{option}: skip")
        self.reasons[reason] += 1
        files = self.places.setdefault(reason, {})
        if file in files:
            files[file].count += 1
        elif len(files) < _KEPT:
            files[file] = Place(1, line)

    def has_both(self, where: str, config: DataConfig) -> None:
        """Counts a line that has a text and a pair, of which the text is taken."""
        text, prompt, response = config.text_field, config.prompt_field, config.response_field
        line = f"{where}: has '{text}', which is taken, beside '{prompt}' and '{response}'"
        self.both = Place(self.both.count + 1, self.both.first) if self.both else Place(1, line)

    def to_json(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "documents": self.documents,
            "left_out": dict(self.reasons),
            "left_out_of": {
                reason: {file: vars(place) for file, place in files.items()}
                for reason, files in self.places.items()
            },
        }

    def summary(self) -> str:
        """One line: how much was left out and why, with the first of them named."""
        counts = ", ".join(f"{n} x {reason}" for reason, n in self.reasons.most_common())
        first = next(iter(next(iter(self.places.values())).values())).first
        return f"{sum(self.reasons.values())} left out ({counts}); the first: {first}"


def left_out_lines(found: dict[str, Any]) -> list[str]:
    """One line a reason that names its files, at most 20; `found` is `Findings.to_json()`."""
    lines = []
    for reason, files in found["left_out_of"].items():
        named = [
            f"{place['first']}"
            + (f" (the first of {place['count']})" if place["count"] > 1 else "")
            for place in list(files.values())[:_NAMED]
        ]
        more = f"; and {len(files) - _NAMED:,} more files" if len(files) > _NAMED else ""
        lines.append(f"{found['left_out'][reason]:,} x {reason}: {'; '.join(named)}{more}")
    return lines


def find_files(names: Iterable[str], what: str) -> list[str]:
    """The files that `names` (files, folders, globs) stand for, each once, folders sorted.

    A folder gives its files with a text or JSONL ending, at any depth and through links; hidden
    ones, token files and what a run writes into its own folder are left out.
    Raises `FileError` when a name stands for nothing.
    """
    found: dict[str, str] = {}
    for name in names:
        if name == corpus.NAME:
            found.setdefault(name, name)
            continue
        here = expand_home(name)
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
    """What a folder gives, through links to folders too; a folder with several names (a loop is
    one) gives its files once, under a name without a link where it has one. A folder that cannot be
    listed is given itself, for `read` to say so."""
    roots, seen, barred = [root], set[str](), list[OSError]()
    for start in roots:  # grows by the links on the way
        for folder, names, files in os.walk(start, onerror=barred.append):
            here = os.path.realpath(folder)
            if here in seen or "train.index" in files:  # token files, in a cache among the texts
                names.clear()
                continue
            seen.add(here)
            names[:] = sorted(name for name in names if not name.startswith("."))
            if _RUN.issubset(files):  # a run among the texts would read its own metrics
                names[:] = [name for name in names if name not in _WRITTEN_BY_RUN]
                files = [name for name in files if name not in _WRITTEN_BY_RUN]
            folders = (os.path.join(folder, name) for name in names)
            roots += filter(os.path.islink, folders)
            for name in files:
                if not name.startswith(".") and name.lower().endswith(TEXT_ENDINGS + LINE_ENDINGS):
                    yield os.path.join(folder, name)
    yield from (error.filename for error in barred)


def read(paths: Iterable[str], config: DataConfig, findings: Findings) -> Iterator[Document]:
    """Every usable document of `paths`, in order."""
    refuse = config.on_bad_file == "refuse"
    for path in paths:
        findings.files += 1
        if path == corpus.NAME:
            for source, text in corpus.python_docs():
                findings.documents += 1
                yield Document(text, source, file=path)
            continue
        lines = path.lower().endswith(LINE_ENDINGS)
        if config.format != "auto":
            lines = config.format == "jsonl"
        try:
            if wrong := _not_to_be_opened(path, config):
                findings.bad(path, *wrong, refuse=refuse, file=path)
                continue
            found = _lines(path, config, findings) if lines else _text(path, config, findings)
            for document in found:
                findings.documents += 1
                yield document
        except OSError as error:
            detail = f"cannot be read ({error.strerror or error})"
            findings.bad(path, "unreadable file", detail, refuse=refuse, file=path)


def _not_to_be_opened(path: str, config: DataConfig) -> tuple[str, str] | None:
    """The reason and detail for a path that is no file, or one of which nobody says how to read it.

    To open a pipe would wait for somebody to write into it.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "folder that cannot be listed" if stat.S_ISDIR(mode) else "pipe, device or socket"
        return "no file", f"is no file but a {kind}"
    if packed := _packed(path):
        return "no text", f"is {packed}"
    if config.format == "auto" and path.lower().endswith(".json"):
        return "JSON file", (
            "JSON is not trained on as text: write one object a line and name it .jsonl, or set "
            "data.format to jsonl or text, to have it read so"
        )
    return None


def _packed(path: str) -> str:
    """What a file is by its first bytes, and what to do with it; "" where it may be text."""
    with open(path, "rb") as file:
        start = file.read(4)
        file.seek(max(4, os.path.getsize(path) - 4))
        end = file.read()
    if start == b"PAR1" != end:
        return ""  # a text may begin so
    return next((said for magic, said in _PACKED.items() if start.startswith(magic)), "")


def _text(path: str, config: DataConfig, findings: Findings) -> Iterator[Document]:
    refuse = config.on_bad_file == "refuse"
    with open(path, "rb") as file:
        data = file.read(config.max_file_bytes + 1)
    if len(data) > config.max_file_bytes:
        detail = f"larger than {config.max_file_bytes:,} bytes; split it, or use JSONL"
        findings.bad(path, "file too large", detail, refuse=refuse, file=path)
        return
    text = _decode(data, path, path, findings, refuse=refuse)
    del data  # who asked works on the text for long
    if text is not None and (not text or text.isspace()):
        findings.bad(path, "empty file", refuse=refuse, file=path)
    elif text is not None:
        yield Document(text, path, file=path)


def _decode(data: bytes, where: str, path: str, findings: Findings, *, refuse: bool) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "no UTF-8"
        detail = f"{kind} text (byte {error.start:,}); save it as UTF-8"
        findings.bad(where, "not UTF-8", detail, refuse=refuse, file=path)
        return None


def _lines(path: str, config: DataConfig, findings: Findings) -> Iterator[Document]:
    refuse = config.on_bad_file == "refuse"
    blank, number = True, 0
    with open(path, "rb") as file:
        while line := file.readline(config.max_line_bytes + 1):
            number += 1
            where = f"{path}, line {number}"
            if not line.strip() and len(line) <= config.max_line_bytes:
                continue
            blank = False
            if len(line) > config.max_line_bytes:
                while line and not line.endswith(b"\n"):
                    line = file.readline(1 << 20)
                detail = f"longer than data.max_line_bytes ({config.max_line_bytes:,})"
                findings.bad(where, "line too long", detail, refuse=refuse, file=path)
                continue
            document = _record(line, number, path, config, findings)
            if document is not None:
                yield document
    if blank:
        findings.bad(path, "empty file", refuse=refuse, file=path)


def _record(
    line: bytes, number: int, path: str, config: DataConfig, findings: Findings
) -> Document | None:
    refuse, where = config.on_bad_file == "refuse", f"{path}, line {number}"
    text = _decode(line, where, path, findings, refuse=refuse)
    if text is None:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        findings.bad(where, "bad JSON", f"bad JSON ({error})", refuse=refuse, file=path)
        return None
    if not isinstance(record, dict):
        detail = f"a JSON object is needed, this is a {type(record).__name__}"
        findings.bad(where, "no JSON object", detail, refuse=refuse, file=path)
        return None
    pair = (config.prompt_field, config.response_field)
    held = {name for name, value in record.items() if value is not None}  # null: as not there
    needed: tuple[str, ...] = pair
    if config.text_field in held and not (config.names_pairs and held.issuperset(pair)):
        needed = (config.text_field,)
        if held.issuperset(pair):
            findings.has_both(where, config)
    if not held.issuperset(needed):
        detail = f"has neither '{config.text_field}' nor {' and '.join(map(repr, pair))}"
        detail += _other_fields([name for name in record if name in held])
        findings.bad(where, "missing field", detail, refuse=refuse, file=path)
        return None
    values = [record[name] for name in needed]
    for name, value in zip(needed, values, strict=True):
        if not isinstance(value, str):
            detail = f"'{name}' is a {type(value).__name__}, not text"
            findings.bad(where, "field is not text", detail, refuse=refuse, file=path)
            return None
        if any("\ud800" <= c <= "\udfff" for c in value):
            detail = f"'{name}' is broken Unicode"
            findings.bad(where, "broken Unicode", detail, refuse=refuse, file=path)
            return None
    if not values[-1].strip():
        findings.bad(where, "empty text", f"'{needed[-1]}' is empty", refuse=refuse, file=path)
        return None
    if len(values) == 1:
        return Document(values[0], where, file=path)
    return Document(values[1], where, prompt=values[0], file=path)


def _other_fields(names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(repr(n if len(n) <= 40 else n[:37] + "...") for n in names[:4])
    more = f" and {len(names) - 4:,} more" if len(names) > 4 else ""
    return (
        f", but {shown}{more}: name yours as data.text_field, or as data.prompt_field and "
        "data.response_field"
    )


def nothing_usable(what: str, findings: Findings) -> ConfigError:
    """The error for data without a single usable document."""
    why = findings.summary() if findings.reasons else "the files hold no text"
    return ConfigError(f"{what}: nothing to read: {why}")
