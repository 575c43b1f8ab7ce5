"""Small JSON files that know when a bit of them has changed.

A sealed file is one JSON object whose first field, `digest`, is the SHA-256 of the file's own bytes
with the 64 digits of the digest itself written as zeros. It covers every byte, white space too.
The second field, `format`, is an integer that says how to read the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from lezero.core.errors import CorruptError, FileError

LIMIT = 64 << 20
"""Largest sealed file that is read or written, in bytes, where no other is named."""

_HEAD = b'{"digest":"'
_ZEROS = b"0" * 64
_DEPTH = 64


def seal(format: int, body: Mapping[str, Any], limit: int | None = None) -> bytes:
    """The bytes of a sealed file, at most `limit` (`LIMIT`). Raises `FileError` when `body` is not
    plain JSON or too large."""
    limit = LIMIT if limit is None else limit
    check_json(body, "the file")
    fields = {"digest": _ZEROS.decode(), "format": format, **body}
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    if len(text) > limit:
        raise FileError(
            f"{len(text):,} bytes of JSON; at most {limit:,} are allowed. "
            "Keep bulk data in tensors, not in documents, and write many small tensors from fewer "
            "ranks."
        )
    digits = hashlib.sha256(text).hexdigest().encode()
    return _HEAD + digits + text[len(_HEAD) + len(digits) :]


def unseal(raw: bytes, where: str, format: int, version: str) -> dict[str, Any]:
    """The fields of a sealed file, once its digest and format are right; `where` names it.

    Raises `CorruptError` when a byte differs from what was written, and `FileError`, naming the
    version of LeZero that reads it, when the file is of another format.
    """
    body = len(_HEAD) + len(_ZEROS)
    whole = raw.startswith(_HEAD) and raw[body : body + 2] == b'",'
    zeroed = _HEAD + _ZEROS + raw[body:]
    if not whole or hashlib.sha256(zeroed).hexdigest().encode() != raw[len(_HEAD) : body]:
        raise _damaged(raw, where, format, version)
    fields = parse_json(raw, where)
    found = fields.get("format")
    if type(found) is not int or found != format:
        raise _other_format(fields, where, format, version)
    return fields


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """Parses one JSON object; repeated keys, deep nesting and non-objects are `CorruptError`."""
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise CorruptError(f"{where}: expected a JSON object")
    return data


def check_json(value: Any, where: str, depth: int = 0) -> None:
    """Raises `FileError`, naming the place, unless `value` comes back from JSON as it went in.

    Tuples are allowed and come back as lists.
    """
    if depth > _DEPTH:
        raise FileError(f"{where}: nested more than {_DEPTH} deep")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise FileError(f"{where}: keys must be text, got {key!r}")
            check_json(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise FileError(f"{where}: {value} cannot be written as JSON; write null or text")
    elif not (value is None or isinstance(value, str | int)):
        raise FileError(f"{where}: {type(value).__name__} cannot be written as JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is given twice")
    return made


def _damaged(raw: bytes, where: str, format: int, version: str) -> FileError:
    """A later format may be sealed in another way, so its number is looked for before giving up."""
    if not raw:
        return CorruptError(f"{where}: empty")
    try:
        fields = parse_json(raw, where)
    except CorruptError:
        fields = {}
    found = fields.get("format")
    if type(found) is int and found > format:
        return _other_format(fields, where, format, version)
    return CorruptError(f"{where}: its bytes do not match its digest (damaged or torn)")


def _other_format(fields: dict[str, Any], where: str, format: int, version: str) -> FileError:
    reader = fields.get("readable_from")
    needs = f"LeZero {reader} or newer" if isinstance(reader, str) else "another LeZero"
    return FileError(
        f"{where}: format {str(fields.get('format'))[:20]} (written by "
        f"{str(fields.get('writer', 'an unknown writer'))[:60]}) is read by {needs[:60]}; this is "
        f"LeZero {version}, which reads format {format}"
    )
