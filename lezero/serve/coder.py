"""Text to tokens and back, and a chat as the model was taught to read it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lezero.core.errors import ConfigError, FileError
from lezero.core.paths import read_regular
from lezero.data import load_tokenizer
from lezero.data.panics import without_panic
from lezero.data.pieces import Pieces
from lezero.data.special import begin_token, special_tokens
from lezero.data.tokenizer import start_of
from lezero.models import gguf_end_tokens, gguf_tokenizer, stop_tokens
from lezero.models.huggingface import read_json
from lezero.serve.sampling import SamplingParams
from lezero.serve.template import render

Message = Mapping[str, Any]
_LIMIT = 1 << 20
_MARK = re.compile(r"lezero \d+ (?:text|key)")


class Coder:
    """A model's tokenizer. end_tokens: those that end a text. template: Jinja, or None.

    inner: has `encode` and `decode`; where it has `special` and `bytes_of` too, as the tokenizers
    of `lezero.data`, stop strings may name special tokens, and log-probabilities do.
    start_tokens: what a prompt begins with for this model, such as <s>. bos: the token that the
    model's config calls its first, which begins a prompt that has nothing else.
    """

    def __init__(
        self,
        inner: Any,
        end_tokens: frozenset[int],
        template: str | None = None,
        specials: Mapping[str, str] | None = None,
        start_tokens: tuple[int, ...] = (),
        bos: int | None = None,
    ) -> None:
        self._inner, self.end_tokens, self.start_tokens = inner, end_tokens, start_tokens
        self._bos = bos
        self.template, self._specials = template, dict(specials or {})

    @property
    def end_token(self) -> int | None:
        """The tokenizer's own end-of-text token; where it is not known, the lowest of them."""
        own = getattr(self._inner, "eos", None)
        return own if own in self.end_tokens else min(self.end_tokens, default=None)

    @property
    def first_token(self) -> int | None:
        """What a prompt without any token begins with."""
        return self.end_token if self._bos is None else self._bos

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt; the start tokens come first, where the text does not write them."""
        found = self._tokens(text)
        start = list(self.start_tokens)
        return found if found[: len(start)] == start else start + found

    def encode_chat(self, text: str) -> list[int]:
        """Tokens of what a chat template gave: it writes start tokens itself, where the model
        wants them (as `apply_chat_template` of transformers). `ConfigError` for none."""
        found = self._tokens(text)
        if not found:
            raise ConfigError("messages: the model's chat template gives no text for them")
        return found

    def _tokens(self, text: str) -> list[int]:
        return [int(token) for token in without_panic(self._inner.encode, text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(without_panic(self._inner.decode, list(tokens)))

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """What tokens are called that leave nothing behind in a text, by id."""
        return getattr(self._inner, "special", {})

    def with_named_ends(self, params: SamplingParams) -> SamplingParams:
        """With special tokens that stop strings name as tokens that end the answer, since they
        leave nothing in its text."""
        ends = {token for token, text in self.special_tokens.items() if text in params.stop}
        if ends <= set(params.stop_token_ids):
            return params
        ids = (*params.stop_token_ids, *sorted(ends - set(params.stop_token_ids)))
        return params.model_copy(update={"stop_token_ids": ids})

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token that may be half a character; None where they are not known."""
        told = getattr(self._inner, "bytes_of", None)
        return None if told is None else told(token)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that the model continues as the assistant.

        A content is text, or a list of {"type": "text", "text": …}, which goes to the template as
        it is where that reads the parts of such a message, and elsewhere as one text. Other keys,
        such as name, are the template's to read.

        Raises `ConfigError` for messages without role or content, and where the tokenizer has no
        chat template, or it fails.
        """
        if self.template is None:
            raise ConfigError(
                "this model's tokenizer has no chat template: give a prompt and use generate"
            )
        _check_messages(messages)
        return render(self.template, self._readable(messages), self._specials)

    def _readable(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with parts as one text where the template would write them as they are,
        or leave out what it writes of a text. Found out with marks in place of the texts."""
        numbers = [i for i, x in enumerate(messages) if isinstance(x["content"], list)]
        if not numbers:
            return messages
        texts = {i: f"lezero {i} text" for i in numbers}
        keys = {i: f"lezero {i} key" for i in numbers}
        parts = {i: [{"type": "text", "text": texts[i], keys[i]: ""}] for i in numbers}
        as_parts, as_texts = self._tried(messages, parts), self._tried(messages, texts)
        in_parts, in_texts = set(_MARK.findall(as_parts or "")), set(_MARK.findall(as_texts or ""))
        one_text = {
            i: joined(messages[i]["content"])
            for i in numbers
            if as_parts is None
            or keys[i] in in_parts
            or (texts[i] not in in_parts and texts[i] in in_texts)
        }
        return _with_contents(messages, one_text)

    def _tried(self, messages: Sequence[Message], contents: Mapping[int, Any]) -> str | None:
        """What the template makes of the messages with other contents; None where it fails."""
        try:
            return render(self.template or "", _with_contents(messages, contents), self._specials)
        except ConfigError:
            return None


def check_coder(coder: object) -> None:
    """Raises `ConfigError` for what is no `Coder`, such as a tokenizer itself."""
    if coder is not None and not isinstance(coder, Coder):
        raise ConfigError(
            f"coder: got a {type(coder).__name__}, allowed is lezero.serve.coder.Coder(tokenizer, "
            "end_tokens)"
        )


def open_coder(place: str | Path, folder: Path | None) -> Coder:
    """The tokenizer of a model: of `folder`, or where there is none of the GGUF file `place`."""
    if folder is None:
        found = gguf_tokenizer(str(place))
        ends = gguf_end_tokens(place)
        ends |= {found.eos_token_id} if isinstance(found.eos_token_id, int) else set()
        named = {f"{kind}_token": getattr(found, f"{kind}_token") for kind in ("bos", "eos")}
        specials = {name: str(text) for name, text in named.items() if text is not None}
        inner = _WithoutSpecials(found)
        start = start_of(inner.encode("a"), found.encode("a"))
        return Coder(inner, ends, found.chat_template, specials, start, found.bos_token_id)
    tokenizer = load_tokenizer(folder)
    ends = frozenset([tokenizer.eos])
    if (folder / "config.json").is_file():
        ends |= frozenset(stop_tokens(folder))
    template, specials = _template(folder)
    if folder != Path(place):  # a run was trained without start tokens
        return Coder(tokenizer, ends, template, specials)
    bos = begin_token(folder)
    known = bos is not None and bos < tokenizer.vocab_size
    return Coder(tokenizer, ends, template, specials, tokenizer.start, bos if known else None)


class _WithoutSpecials:
    """A tokenizer of transformers that neither adds nor shows special tokens."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.eos = inner, inner.eos_token_id
        backend = getattr(inner, "backend_tokenizer", None)  # one in Python alone has none
        if backend is not None:
            pieces = Pieces(backend)
            self.special, self.bytes_of = pieces.special, pieces.bytes_of

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        return str(self._inner.decode(tokens, skip_special_tokens=True))


def _template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template and the special tokens that it may name."""
    path, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = read_json(path) if path.is_file() else {}
    try:
        is_own = os.path.lexists(own)
        text = read_regular(own, _LIMIT).decode() if is_own else settings.get("chat_template")
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"{own}: cannot be read ({error})") from None
    if isinstance(text, list):  # several by name
        named = [x for x in text if isinstance(x, dict) and x.get("name") == "default"]
        text = named[0].get("template") if named else None
    if text is not None and (not isinstance(text, str) or len(text) > _LIMIT):
        raise FileError(f"{path}: its chat template is no text of at most {_LIMIT >> 20} MiB")
    return text, special_tokens(folder)


def _with_contents(messages: Sequence[Message], contents: Mapping[int, Any]) -> list[Message]:
    return [{**x, "content": contents.get(i, x["content"])} for i, x in enumerate(messages)]


def _check_messages(messages: Sequence[Message]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ConfigError(f"messages: got {type(messages).__name__}, allowed is a list of them")
    if not messages:
        raise ConfigError("messages: got none, give at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"messages[{number}].role: got no text; each message has one")
        _check_content(message.get("content"), f"messages[{number}].content")


def _check_content(content: Any, name: str) -> None:
    if isinstance(content, list):
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ConfigError(
                    f"{name}[{number}]: got a part of type {kind!r}, allowed are parts of type "
                    "'text' with a text"
                )
    elif not isinstance(content, str):
        raise ConfigError(f"{name}: got no text; each message has one, or a list of parts")


def joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a message, whose content may be parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
