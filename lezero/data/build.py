"""From a config to rows: read, split, train the tokenizer, tokenize once, map.

The result lies in a cache folder under a name that is a digest of everything it depends on, so the
next run with the same files, tokenizer and settings only maps it. Deleting the cache costs time,
never data. With several ranks, rank 0 builds and the others wait for as long as it takes.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lezero.core import errors, groups
from lezero.core.errors import ConfigError, FileError, LeZeroError, OrderError
from lezero.core.facts import cache_folder
from lezero.core.log import logger
from lezero.core.paths import expand_home
from lezero.data import corpus, store
from lezero.data.config import DataConfig
from lezero.data.reading import Document, Findings, find_files, left_out_lines, nothing_usable, read
from lezero.data.special import MODEL
from lezero.data.split import HELD, TRAIN, Split, select
from lezero.data.store import TokenRows, Writer
from lezero.data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    load_tokenizer,
    tokenizer_files,
)
from lezero.files.folder import aside, commit

_NEWS_S = 20.0
_BUILD = 13
"""Form of the findings, the split and what is read: a folder of another form is made again."""
_LARGEST = 64 << 20
_log = logger("data")


@dataclass(frozen=True)
class Data:
    """What a run trains on. `findings` tells what was read and what was left out."""

    train: TokenRows
    validation: TokenRows | None
    tokenizer: Tokenizer
    findings: dict[str, Any]
    folder: Path


def prepare(config: DataConfig, cache: str | Path | None = None) -> Data:
    """The rows and the tokenizer that `config` asks for, made or found in `cache`.

    Without `cache` they lie in the user's (`LEZERO_CACHE`). Call it on every rank; rank 0 builds.
    Raises, on all ranks alike, `FileError` (a file is missing or refused, or the cache cannot be
    written), `ConfigError` (nothing usable) and `MissingExtraError`.
    """
    root = Path(expand_home(cache)) if cache is not None else cache_folder() / "data"
    if groups.launched() and not groups.active():
        raise OrderError("join the other ranks (lezero.core.groups.join) before preparing data")
    folder = Path(_on_first_rank(lambda: str(_find_or_build(config, root))))
    if not folder.is_dir():
        raise FileError(
            f"{folder}: rank 0 prepared the data there, but rank {groups.rank()} cannot see it; "
            "name a cache folder that all machines share"
        )
    return _open(folder, config)


def _open(folder: Path, config: DataConfig) -> Data:
    manifest = store.read_manifest(folder)
    train = store.open_rows(folder, manifest, "train", config.sequence)
    held = store.open_rows(folder, manifest, "validation", config.sequence)
    findings = manifest["findings"]
    if findings["left_out"] and groups.is_main():
        for line in left_out_lines(findings):
            _log.warning("data: left out: %s", line)
    if not len(train):
        raise ConfigError(
            f"data.train: {', '.join(config.train)}: too little text: the tokenizer makes "
            f"{train.tokens} token of it, end of text included, and a row takes 2; give more text"
        )
    if train.tokens < config.sequence and groups.is_main():
        _warn_of_long_rows(config, f"{train.tokens:,} tokens")
    if train.cut and groups.is_main():
        _log.warning("data: %d pairs are longer than a row and are cut", train.cut)
    tokenizer = load_tokenizer(folder / "tokenizer")
    findings["tokens"] = {"train": train.tokens, "validation": held.tokens}
    if isinstance(config.validation, float) and groups.is_main():
        _warn_of_share(config.validation, held.tokens / (train.tokens + held.tokens))
    return Data(train, held if len(held) else None, tokenizer, findings, folder)


def _warn_of_share(asked: float, share: float) -> None:
    if asked and not asked / 2 <= share <= min(2 * asked, (1 + asked) / 2):
        _log.warning(
            "data.validation: %.3g%% of the tokens are held out, where %.3g%% were asked for: what "
            "is not divided differs too much in length; name files, or give more documents",
            *(100 * share, 100 * asked),
        )


def missing_files(config: DataConfig) -> list[str]:
    """What `prepare` would say of each name in data.train and data.validation that stands for no
    file; nothing is read."""
    named = [("data.train", name) for name in config.train]
    named += [("data.validation", name) for name in _held_names(config)]
    found = []
    for what, name in named:
        try:
            find_files([name], what)
        except FileError as error:
            found.append(str(error))
    return found


def foresee_rows(config: DataConfig) -> None:
    """Warns, without reading the text, of rows that are surely longer than all of it: a token is
    one byte or more, and each file ends with one more token. Files that are not there yet count as
    enough (`missing_files` names them)."""
    try:
        files = find_files(config.train, "data.train")
        size = sum(os.path.getsize(path) + 1 for path in files if path != corpus.NAME)
    except (FileError, OSError):
        return
    if corpus.NAME not in files and size < config.sequence:
        _warn_of_long_rows(config, f"at most {size:,} tokens")


def foresee_cache(cache: Path | None = None) -> None:
    """Warns where the token files that a run makes cannot be kept (`prepare` refuses then)."""
    root = cache_folder() / "data" if cache is None else cache
    there = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return
    if root.is_dir() and any(root.glob("tokens-*")):  # perhaps those of this run
        return
    _log.warning(
        "data: token files cannot be written into %s (%s %s), so `lz train` will refuse: set "
        "LEZERO_CACHE to a folder that can be written",
        root,
        there,
        "cannot be written to" if there.is_dir() else "is no folder",
    )


def _warn_of_long_rows(config: DataConfig, text: str) -> None:
    _log.warning(
        "data.sequence: a row has %s tokens and the whole training text %s; the rest is filled up "
        "and computed for nothing: give data.train more text, or lower data.sequence",
        f"{config.sequence:,}",
        text,
    )


def _find_or_build(config: DataConfig, root: Path) -> Path:
    train = find_files(config.train, "data.train")
    held = find_files(_held_names(config), "data.validation")
    key = _key(config, train, held)
    before = _looks([*train, *held])
    folder = root / f"tokens-{key[:24]}"
    if folder.is_dir():
        try:
            store.read_manifest(folder)
            return folder
        except FileError as error:
            _log.warning("data: %s; the token files are made again", error)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with aside(root, "tokens") as made:
            try:
                _build(config, train, held, made)
            finally:
                corpus.python_docs.cache_clear()
            _check_unchanged(before, _looks([*train, *held]))
            commit(made, folder)
    except OSError as error:
        raise FileError(
            f"data: token files cannot be written into {root} ({error.strerror or error}); make "
            "room there, or set LEZERO_CACHE to a folder that can be written"
        ) from error
    return folder


def _held_names(config: DataConfig) -> tuple[str, ...]:
    return config.validation if isinstance(config.validation, tuple) else ()


def _key(config: DataConfig, train: list[str], held: list[str]) -> str:
    """Digest of all that the token files depend on; texts count by path, length and time, what a
    tokenizer is read from by what it holds, since that of a GGUF is written anew each time."""
    settings = config.model_dump(mode="json", exclude={"train", "sequence", "on_bad_file"})
    settings["tokenizer"]["folder"] = config.tokenizer.folder is not None
    if isinstance(config.validation, tuple):
        settings["validation"] = "files"
    parts: list[object] = [store.FORMAT, _BUILD, sorted(settings.items()), config.on_bad_file]
    for paths in (train, held):
        parts.append(len(paths))
        for path in paths:
            parts.append(corpus.identity() if path == corpus.NAME else _named(path))
    parts += map(_held_in, _tokenizer_files(config))
    return store.digest_of(parts)


def _named(path: str) -> tuple[object, ...]:
    """A text's stamp and the ending of the name it goes by, which says how it is read: a link may
    have another than the file."""
    return (os.path.basename(path).lower().rpartition(".")[2], *_stamp(path))


def _held_in(path: str) -> tuple[object, ...]:
    """A file's name and digest; of one too large for a tokenizer, its stamp."""
    try:
        if os.path.getsize(path) <= _LARGEST:
            with open(path, "rb") as file:
                return (os.path.basename(path), hashlib.file_digest(file, "sha256").hexdigest())
    except OSError:  # reading the tokenizer will say so
        pass
    return _stamp(path)


def _tokenizer_files(config: DataConfig) -> list[str]:
    if config.tokenizer.folder is None:
        return []
    place = Path(expand_home(config.tokenizer.folder))
    if not place.exists():
        raise FileError(f"data.tokenizer.folder: {place}: no such file or folder")
    if place.is_file():
        beside = (path for name in MODEL if (path := place.with_name(name)).is_file())
        return [str(place), *map(str, (*tokenizer_files(place), *beside))]
    return sorted(map(str, place.glob("*.*")))


def _stamp(path: str) -> tuple[object, ...]:
    try:
        found = os.stat(path)
    except OSError as error:  # a broken link, for example: reading will say so
        return (os.path.abspath(path), error.errno)
    # The second time is one that no program can set back, as `cp -p` and rsync do the first.
    return (os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _looks(paths: list[str]) -> list[tuple[object, ...]]:
    """Their stamps without the times that a backup's links change too."""
    return [_stamp(path)[:3] for path in paths if path != corpus.NAME]


def _check_unchanged(before: list[tuple[object, ...]], now: list[tuple[object, ...]]) -> None:
    """Raises `FileError` where a file has changed: they are read several times, so that documents
    of both parts would have mixed."""
    for one, two in zip(before, now, strict=True):
        if one != two:
            raise FileError(f"data: the files changed while they were read; start again ({one[0]})")


def _build(config: DataConfig, train: list[str], held: list[str], folder: Path) -> None:
    findings = Findings()
    parts = Split(config)
    held_documents = list(parts.scan(held, HELD, findings))
    documents = list(parts.scan(train, None, findings))
    if findings.both:
        _log.warning(
            "%s (such lines: %d); to learn from such pairs, set data.text_field to a name that no "
            "line has", findings.both.first, findings.both.count,
        )  # fmt: skip
    cut_one = parts.settle(documents)
    if not documents.count(TRAIN):
        raise nothing_usable("data.train", findings)
    if held and not held_documents.count(HELD):
        raise nothing_usable("data.validation", findings)

    def chosen(part: int) -> Iterator[Document]:
        yield from select(read(train, config, Findings()), documents, part, cut_one)
        yield from select(read(held, config, Findings()), held_documents, part, 0.0)

    texts = (text for d in chosen(TRAIN) for text in (d.prompt, d.text) if text)
    tokenizer = build_tokenizer(config.tokenizer, texts)
    tokenizer.save(folder / "tokenizer")
    if load_tokenizer(folder / "tokenizer").digest != tokenizer.digest:
        raise FileError(
            f"data.tokenizer.folder: {config.tokenizer.folder}: this tokenizer cannot be saved "
            "with the run; save it by transformers' save_pretrained and name that folder"
        )
    files: dict[str, Any] = {}
    for name, part in zip(store.PARTS, (TRAIN, HELD), strict=True):
        with Writer(folder, name, tokenizer) as writer:
            for document in chosen(part):
                if document.prompt is None:
                    writer.add_text(document.text)
                else:
                    writer.add_pair(document.prompt, document.text)
        files |= writer.files()
    body = {
        "files": files,
        "dtype": writer.dtype.str,
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
        "tokenizer": tokenizer.digest,
        "findings": findings.to_json(),
    }
    store.write_manifest(folder, body)


def _on_first_rank(work: Callable[[], str]) -> str:
    """`work()` of rank 0 on every rank; what it raises is raised on all of them."""
    outcome: dict[str, str] = {}
    caught: list[BaseException] = []

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:
            caught.append(error)
            outcome.update(error=type(error).__name__, text=str(error))

    if groups.world_size() == 1:
        return work()
    if not groups.is_main():
        while not outcome:
            outcome = groups.broadcast_object(outcome)
    else:
        # A collective waits for minutes, tokenizing may take hours: news keeps the others waiting.
        thread = threading.Thread(target=run, name="lezero-data")
        thread.start()
        done = False
        while not done:
            thread.join(_NEWS_S)
            done = not thread.is_alive()
            groups.broadcast_object(dict(outcome) if done else {})
    if caught:
        raise caught[0]
    if "error" in outcome:
        kind = getattr(errors, outcome["error"], LeZeroError)
        raise kind(outcome["text"])
    return outcome["value"]
