"""Tokenizers: bytes (built in), byte-level BPE trained here, or any Hugging Face tokenizer folder.

All of them save in the Hugging Face layout, so that `transformers.AutoTokenizer` opens the folder
with equal encodings (of type `qwen2`: `PreTrainedTokenizerFast`, see docs/models.md). No token is
added by itself; an end-of-text token written out in a text is read as that token, as there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError, LeZeroError, need_extra
from lezero.core.paths import expand_home
from lezero.data.added import OLD_LIST, with_declared
from lezero.data.config import TokenizerConfig
from lezero.data.panics import need_sound, without_panic
from lezero.data.pieces import Pieces, byte_letters, splits_words
from lezero.data.special import (
    END_ID,
    EOS,
    ROWS,
    SETTINGS,
    TOKENIZER_FILES,
    all_settings,
    both_settings,
    end_of_model,
    named_end,
    rows_of_model,
    special_texts,
)
from lezero.files.folder import make_folder, write_file

_PIECE = 1 << 20
_TRAINED_ON = 1 << 28
_LIMIT = 256 << 20
_OF_TOKENIZERS = ("*token*", "*vocab*", "*merges*", "*.model", "*.tiktoken")


class Tokenizer:
    """Text to token ids and back.

    vocab_size: ids are below it. eos: id of the end-of-text token. start: tokens that the model
    was taught to read before a prompt; `encode` leaves them out. digest: of what decides the
    encoding. special: text of special tokens, which `decode` leaves out, by id. Made by
    `bytes_tokenizer`, `train_tokenizer` or `load_tokenizer`.
    """

    vocab_size: int
    eos: int
    start: tuple[int, ...] = ()
    digest: str
    _apart = True
    """Whether words are encoded the same wherever they stand."""

    def __repr__(self) -> str:
        return f"<Tokenizer: {self.vocab_size:,} ids, end of text {self.eos}>"

    @property
    def special(self) -> Mapping[int, str]:
        return {}

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token that may be half a character; None where they are not known."""
        return None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. A text above 1 MiB is encoded in pieces that end with a line, where
        that makes no difference."""
        parts = self.encode_parts(text)
        found = next(parts)
        for part in parts:
            found += part
        return found

    def encode_parts(self, text: str) -> Iterator[list[int]]:
        """The same, piece by piece: a token in a list takes twenty times its text."""
        if len(text) <= _PIECE or not self._apart:
            yield self._encode(text)
        else:
            yield from map(self._encode, _pieces(text))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; end-of-text and other special tokens leave nothing behind."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer's files in the Hugging Face layout into `folder`."""
        raise NotImplementedError

    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError


class _Bytes(Tokenizer):
    """One token a byte of UTF-8 (ids 0 to 255), then the end-of-text token."""

    vocab_size, eos, digest = 257, 256, "bytes-1"

    @property
    def special(self) -> Mapping[int, str]:
        return {self.eos: EOS}

    def bytes_of(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else None

    def _encode(self, text: str) -> list[int]:
        first, *rest = (list(part.encode("utf-8")) for part in text.split(EOS))
        for part in rest:
            first += [self.eos, *part]
        return first

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def save(self, folder: str | Path) -> None:
        alphabet = byte_letters()
        vocab = {alphabet[byte]: byte for byte in range(256)} | {EOS: self.eos}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        special = {"content": EOS, "single_word": False, "lstrip": False, "rstrip": False}
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": self.eos, **special, "normalized": False, "special": True}],
            "normalizer": None,
            "pre_tokenizer": {**level, "use_regex": False},
            "post_processor": None,
            "decoder": {**level, "use_regex": False},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab}
            | {"fuse_unk": False, "byte_fallback": False, "merges": []},
        }
        text = json.dumps(content, ensure_ascii=False)
        _save(Path(expand_home(folder)), text, {"lezero": "bytes"})


class _Backed(Tokenizer):
    """A tokenizer of the package `tokenizers`.

    files: the file of each name that saving copies; without any, it is written out. settings: what
    is written beside it; where that is nothing, what the files say is enough.
    """

    def __init__(
        self,
        inner: Any,
        eos: int,
        start: tuple[int, ...] = (),
        files: dict[str, Path] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner, self.eos, self.start = inner, eos, start
        self._files, self._settings = files, settings or {}
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self._apart = splits_words(inner)
        text = f"{eos}\n{inner.to_str()}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._inner)

    @property
    def special(self) -> Mapping[int, str]:
        return self._pieces.special

    def bytes_of(self, token: int) -> bytes | None:
        return self._pieces.bytes_of(token)

    def _encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))

    def save(self, folder: str | Path) -> None:
        root = Path(expand_home(folder))
        if self._files is None:
            _save(root, self._inner.to_str(), self._settings | _end(self._inner, self.eos))
            return
        make_folder(root)
        for name, path in self._files.items():
            shutil.copyfile(path, root / name)
        if self._settings:
            _write(root, {"tokenizer_config.json": json.dumps(self._settings, indent=1) + "\n"})


def bytes_tokenizer() -> Tokenizer:
    """The built-in tokenizer: needs no extra and no training."""
    return _Bytes()


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab` entries (fewer where the text has no more pairs).

    Deterministic: equal texts give an equal tokenizer. The first 256 Mi characters are used.
    """
    library = _library("training a tokenizer")
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_first(texts), trainer)
    return _Backed(inner, inner.token_to_id(EOS))


def load_tokenizer(place: str | Path) -> Tokenizer:
    """Opens a Hugging Face tokenizer folder, or a tokenizer.json.

    Tokens that the settings beside it declare are added (`with_declared`). A folder without
    tokenizer.json is opened by transformers (extra `hf`). Where the tokenizer's files name no
    end-of-text token, it is the first `eos_token_id` of the model beside them, "<|endoftext|>", or
    else their `sep_token`. Raises `FileError` when there is none, it cannot be read, or nothing
    names an end-of-text token.
    """
    path = Path(expand_home(place))
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    if not path.exists():
        raise FileError(f"tokenizer {place}: no such file or folder")
    settings = all_settings(folder)
    if settings.get("lezero") == "bytes" and file.name == "tokenizer.json":
        return _Bytes()
    if not file.is_file():
        inner, settings = _converted(folder)
        if (eos := named_end(inner, settings)) is None:
            eos = end_of_model(inner, folder, settings)
        return _Backed(inner, eos, _start(inner), settings=settings)
    if file.stat().st_size > _LIMIT:
        raise FileError(f"{file}: larger than {_LIMIT >> 20} MiB; that is no tokenizer")
    library = _library("this tokenizer")
    try:
        inner = without_panic(library.Tokenizer.from_file, str(file))
    except Exception as error:  # the package raises plain Exception
        raise FileError(f"{file}: not a tokenizer file ({error})") from None
    need_sound(inner, file)
    files = {path.name: path for path in tokenizer_files(path)} | {"tokenizer.json": file}
    rows = rows_of_model(folder, settings)
    inner, more = with_declared(inner, folder, old_list=OLD_LIST in files, rows=rows)
    told: dict[str, Any] = {ROWS: rows} if more else {}  # what the files alone do not say
    if (eos := named_end(inner, settings)) is None:
        eos = end_of_model(inner, folder, settings)
        told |= _end(inner, eos)
    if told:
        told = {"tokenizer_class": "PreTrainedTokenizerFast", **both_settings(folder)[1], **told}
    return _Backed(inner, eos, _start(inner), files, told)


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has any file of a tokenizer, whole or not."""
    return any(path.is_file() for pattern in _OF_TOKENIZERS for path in folder.glob(pattern))


def tokenizer_files(place: Path) -> list[Path]:
    """The files that a tokenizer of this folder, or of this file, is read from or saved with.

    Beside a file of another name than tokenizer.json that is what says its special tokens: the
    folder's other files are another tokenizer's.
    """
    folder = place if place.is_dir() else place.parent
    own = place.is_dir() or place.name == "tokenizer.json"
    found = [folder / name for name in (TOKENIZER_FILES if own else SETTINGS)]
    return [path for path in found if path.is_file()]


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `config` asks for; `texts` are read only to train one."""
    if config.train is not None:
        return train_tokenizer(texts, config.train)
    return load_tokenizer(config.folder) if config.folder is not None else bytes_tokenizer()


def _first(texts: Iterable[str]) -> Iterator[str]:
    left = _TRAINED_ON
    for text in texts:
        for piece in _pieces(text):
            if left <= 0:
                return
            left -= len(piece)
            yield piece


def _pieces(text: str) -> Iterator[str]:
    """Cuts where byte-level BPE never joins: after a line, else before a space between words."""
    start = 0
    while len(text) - start > _PIECE:
        end = _cut(text, start, start + _PIECE)
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(text: str, start: int, end: int) -> int:
    at = end
    while (at := text.rfind("\n", start, at) + 1) > start:
        if not text[at].isspace() and not text[max(start, at - 2)].isspace():
            return at
        at -= 1
    at = end
    while (at := text.rfind(" ", start + 1, at)) > start:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return end


def _end(inner: Any, eos: int) -> dict[str, Any]:
    added = inner.get_added_tokens_decoder()
    return {"eos_token": added[eos].content} if eos in added else {"eos_token": None, END_ID: eos}


def _start(inner: Any) -> tuple[int, ...]:
    """What the tokenizer puts before a text. As in transformers `add_bos_token` says nothing where
    there is a tokenizer.json; where there is none, what is converted heeds it."""
    plain, whole = (list(inner.encode("a", add_special_tokens=x).ids) for x in (False, True))
    return start_of(plain, whole)


def start_of(plain: Sequence[int], whole: Sequence[int]) -> tuple[int, ...]:
    """The tokens of `whole` before `plain`: a text with and without special tokens."""
    ends = range(len(whole) - len(plain) + 1)
    at = next((i for i in ends if list(whole[i : i + len(plain)]) == list(plain)), 0)
    return tuple(whole[:at])


def _converted(folder: Path) -> tuple[Any, dict[str, Any]]:
    """What transformers makes of a folder without tokenizer.json, and what its settings say."""
    none = FileError(
        f"tokenizer {folder}: the folder holds no tokenizer; copy the files of the model's "
        "(tokenizer.json, tokenizer_config.json) into it"
    )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        what = f"the tokenizer {folder} (it has no tokenizer.json)"
        raise need_extra("hf", "transformers", what) from error
    try:
        opened = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        found = opened.backend_tokenizer
    except Exception as error:
        if not holds_tokenizer(folder):
            raise none from None
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if first.rstrip().endswith(":"):  # a list of what transformers looked for
            first = "its files do not say of which kind it is; copy the model's tokenizer.json, too"
        raise FileError(f"tokenizer {folder}: no tokenizer that can be read ({first})") from None
    if found.get_vocab_size() <= len(found.get_added_tokens_decoder()):
        # for some types of models transformers makes one of special tokens where there is no file
        raise none
    need_sound(found, folder)
    kept = special_texts(opened.special_tokens_map)
    if isinstance(opened.chat_template, str):
        kept["chat_template"] = opened.chat_template
    return found, kept


def _library(what: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise need_extra("text", "tokenizers", what) from error
    return tokenizers


def _save(folder: Path, content: str, extra: dict[str, Any]) -> None:
    make_folder(folder)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        **extra,
    }
    files = {
        "tokenizer.json": content,
        "tokenizer_config.json": json.dumps(settings, indent=1) + "\n",
        "special_tokens_map.json": json.dumps({"eos_token": settings["eos_token"]}, indent=1)
        + "\n",
    }
    _write(folder, files)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        for name, text in files.items():
            write_file(folder / name, text.encode("utf-8"))
    except LeZeroError as error:
        raise FileError(f"the tokenizer could not be saved: {error}") from error
