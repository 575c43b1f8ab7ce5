"""Tokens that the settings beside a tokenizer.json declare, which transformers adds to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError
from lezero.core.log import logger
from lezero.data.special import SETTINGS, all_settings, both_settings, read_object, special_texts

OLD_LIST = "added_tokens.json"
_LISTED = "added_tokens_decoder"
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
_NEEDED = ("bos_token", "eos_token", "sep_token", "cls_token")
_LOG = logger("data")
_SHOWN = 5
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def with_declared(
    inner: Any, folder: Path, *, old_list: bool, rows: int | None
) -> tuple[Any, bool]:
    """A tokenizer of the package `tokenizers` with the added tokens that its folder declares, and
    whether some of them are not of the model, which has `rows` tokens if that is known.

    As in transformers `added_tokens_decoder` of tokenizer_config.json lists them, and its flags
    count before those in tokenizer.json. Where it is missing, special_tokens_map.json counts, and
    added_tokens.json (if `old_list`) for what tokenizer.json does not add. Special tokens that
    settings name without an id are added if they are in the vocabulary; what it lacks no model has
    learned, so that, other than in transformers, it stays text. So does, with a warning, a listed
    token that the tokenizer cannot give the listed id, or that is new and not of the model, also
    where tokenizer.json adds it; one of its vocabulary keeps the id there.
    """
    inner, left_out = _of_model(inner, folder, rows)
    known = inner.get_added_tokens_decoder()
    named, settings = both_settings(folder)
    is_listed = _LISTED in settings
    path = folder / (SETTINGS[1] if is_listed else OLD_LIST)
    by_name, others = _specials(folder, settings, {} if is_listed else named)
    special = by_name | others
    if is_listed:
        listed = dict(_listed(settings[_LISTED], path))
    else:
        old = dict(_old_list(path, special)) if old_list else {}
        texts = {token.content for token in known.values()}
        listed = {i: x for i, x in old.items() if i not in known and x.content not in texts}
    flags = {repr(token) for token in known.values()}
    changed = [(i, x) for i, x in sorted(listed.items()) if x.content and repr(x) not in flags]
    of_model = [(i, x) for i, x in changed if rows is None or i < rows or _has(inner, x)]
    if beyond := [x for x in changed if x not in of_model and x[1].content not in left_out]:
        _LOG.warning(
            "%s lists tokens beyond the %d of the model, %s: they stay text", path, rows,
            _shown(beyond),
        )  # fmt: skip
    fit = _that_fit(inner, known, of_model, path)
    for token in fit:
        token.special = token.special or token.content in by_name
    there = {token.content for token in (*known.values(), *fit)}
    missing = {text: token for text, token in special.items() if text not in there}
    plain = [token for text, token in missing.items() if inner.token_to_id(text) is not None]
    inner.add_tokens([*fit, *plain])
    hidden = {token.content for token in known.values() if token.special}
    if any(token.content in hidden and not token.special for token in fit):
        inner = type(inner).from_str(inner.to_str())  # else the package goes on to hide them
    return inner, bool(beyond or left_out)


def _of_model(inner: Any, folder: Path, rows: int | None) -> tuple[Any, set[str]]:
    """The tokenizer without tokens that it adds beyond those of the model, and their texts. One
    that begins or ends texts or is put around them stays, since config.json is older then, and
    those before it, since its number would change."""
    inner.no_padding()
    added = sorted(inner.get_added_tokens_decoder().items())
    plain = inner.get_vocab(with_added_tokens=False)
    beyond = [(i, x) for i, x in added if rows is not None and i >= rows and x.content not in plain]
    named = special_texts(all_settings(folder))
    needed = {named.get(name) for name in _NEEDED}
    around = inner.encode("a").ids
    last = max((i for i, x in beyond if i in around or x.content in needed), default=-1)
    beyond = [(i, x) for i, x in beyond if i > last]
    if not beyond:
        return inner, set()
    _LOG.warning(
        "%s adds tokens beyond the %d of the model, %s: they stay text",
        folder / "tokenizer.json", rows, _shown(beyond),
    )  # fmt: skip
    texts = {token.content for _, token in beyond}
    content = json.loads(inner.to_str())
    content["added_tokens"] = [x for x in content["added_tokens"] if x["content"] not in texts]
    return type(inner).from_str(json.dumps(content)), texts


def _has(inner: Any, token: Any) -> bool:
    return inner.token_to_id(token.content) is not None


def _that_fit(
    inner: Any, known: Mapping[int, Any], listed: Iterable[tuple[int, Any]], path: Path
) -> list[Any]:
    """Of listed tokens, by rising id, those that are in the vocabulary or come next behind it."""
    following = max(inner.get_vocab_size(with_added_tokens=False), *(i + 1 for i in known), 0)
    fit, new, others = list[Any](), set[str](), list[tuple[int, Any]]()
    for number, token in listed:
        if _has(inner, token) or token.content in new:
            fit.append(token)
        elif number == following:
            fit.append(token)
            new.add(token.content)
            following += 1
        else:
            others.append((number, token))
    if others:
        _LOG.warning(
            "%s lists tokens that do not fit tokenizer.json, %s: they stay text; if texts hold "
            "them, copy both files of the model again", path, _shown(others),
        )  # fmt: skip
    return fit


def _shown(listed: list[tuple[int, Any]]) -> str:
    texts = [f"{token.content!r:.80} as {number}" for number, token in listed]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def _specials(
    folder: Path, settings: Mapping[str, Any], named: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Special tokens by text: those that have a name, and those of lists. named: what
    special_tokens_map.json says, if it counts."""
    every = {**settings, **named}
    values = [value for name, value in every.items() if name.endswith("_token")]
    extra = settings.get(_EXTRA) or settings.get(_OLD_EXTRA) or named.get(_OLD_EXTRA)
    others: list[Any] = []
    for some in (extra, named.get(_EXTRA)):
        if isinstance(some, dict):
            values += some.values()
        elif isinstance(some, list):
            others += some
    return dict(_tokens(values, folder)), dict(_tokens(others, folder))


def _tokens(values: Iterable[Any], folder: Path) -> Iterator[tuple[str, Any]]:
    for value in values:
        fields = {"content": value} if isinstance(value, str) else value
        if isinstance(fields, dict) and isinstance(fields.get("content"), str):
            token = _token({**fields, "special": True}, f"{folder}: {fields['content']!r:.80}")
            yield token.content, token


def _listed(content: Any, path: Path) -> Iterator[tuple[int, Any]]:
    if not isinstance(content, dict):
        raise FileError(f"{path}: {_LISTED}: is no JSON object; copy the file of the model again")
    for number, fields in content.items():
        name = f"{path}: {_LISTED}[{number!r:.40}]"
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise FileError(f"{name}: is no token's number; copy the file of the model again")
        yield int(number), _token(fields, name)


def _old_list(path: Path, special: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    for text, number in read_object(path).items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise FileError(
                f"{path}: {text!r:.80}: got {number!r:.40}, allowed is a token's number"
            )
        fields = {"normalized": text not in special, "special": text in special}
        yield number, _token({"content": text, **fields}, str(path))


def _token(fields: Any, name: str) -> Any:
    import tokenizers

    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise FileError(f"{name}: got {fields!r:.80}, allowed is a token with its content")
    flags = {flag: fields[flag] for flag in _FLAGS if flag in fields}
    wrong = [flag for flag, value in flags.items() if not isinstance(value, bool)]
    if wrong:
        raise FileError(f"{name}: {wrong[0]}: got {flags[wrong[0]]!r:.40}, allowed are true, false")
    return tokenizers.AddedToken(fields["content"], **flags)
