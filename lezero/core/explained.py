"""What pydantic finds wrong with a config, as people read it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from lezero.core.errors import ConfigError, Problem

_Path = tuple[str | int, ...]


def explain(cls: type[BaseModel], error: ValidationError) -> ConfigError:
    """Turns pydantic's error into ours: field path, value, what is allowed, nearest key.

    A union has one problem: what its branches allow, or, where one took the value as a whole, what
    is wrong inside.
    """
    found: dict[tuple[_Path, int], list[Any]] = {}
    kinds: dict[_Path, Any] = {}
    for number, item in enumerate(error.errors()):
        path, kind = _place(cls, item["loc"]) or (item["loc"], None)
        kinds[path] = kind
        joined = path != item["loc"] and item["type"] not in _OF_ITS_OWN
        found.setdefault((path, -1 if joined else number), []).append(item)
    made: list[tuple[Problem, bool]] = []
    for (path, number), items in found.items():
        nested = items[0].get("ctx", {}).get("error")
        if isinstance(nested, ConfigError) and nested.problems:
            inner = [Problem((*path, *p.path), p.value, p.reason) for p in nested.problems]
        else:
            inner = [Problem(path, items[0]["input"], _reason(cls, path, kinds[path], items))]
        made += [(problem, number < 0) for problem in inner]
    paths = [problem.path for problem, _ in made]
    told = tuple(
        problem
        for problem, joined in made
        if not joined or not any(_is_inside(path, problem.path) for path in paths)
    )
    return ConfigError("; ".join(map(str, told)), told)


_OF_ITS_OWN = ("extra_forbidden", "missing", "value_error")
"""Errors that do not say what is allowed."""


def _is_inside(path: _Path, outer: _Path) -> bool:
    return len(path) > len(outer) and path[: len(outer)] == outer


def _place(kind: Any, loc: _Path) -> tuple[_Path, Any] | None:
    """The path that `loc` stands for and the type of what is there: pydantic names the branch too
    where it goes through a union. None where `loc` leads out of `kind`."""
    if get_origin(kind) is Annotated:
        return _place(get_args(kind)[0], loc)
    if not loc:
        return (), kind
    key, rest, inner = loc[0], loc[1:], get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        branches = [one for one in inner if one is not NoneType]
        if len(branches) == 1:
            return _place(branches[0], loc)
        found = next(filter(None, (_place(branch, rest) for branch in branches)), None)
        return ((), kind) if found and not rest else found
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(key))
        below = field and _place(field.annotation, rest)
    elif get_origin(kind) is dict:
        below = _place(inner[1], rest)
    elif inner and isinstance(key, int):
        each = get_origin(kind) is not tuple or inner[-1] is Ellipsis
        below = _place(inner[0 if each else key], rest) if each or key < len(inner) else None
    else:
        below = None
    return below and ((key, *below[0]), below[1])


def _reason(cls: type[BaseModel], path: _Path, kind: Any, items: list[Any]) -> str:
    """`items` are the errors of one value: of several branches where it is a union's."""
    item = items[0]
    error, value = item["type"], item["input"]
    if error == "extra_forbidden":
        known = sorted(_model_at(cls, path[:-1]).model_fields)
        near = difflib.get_close_matches(str(path[-1]), known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key; {hint}"
    if error == "missing":
        return "required, but not given"
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    message = _allowed(error, str(item["msg"]))
    if error == "value_error":  # one about a whole section names the fields that it is about
        return message if isinstance(value, Mapping) else f"{message} (got {shown})"
    if error == "int_parsing_size":
        message = _whole(cls, path)
    inner = get_args(kind)
    none = NoneType in inner
    if path == item["loc"]:
        branches = [one for one in inner if one is not NoneType]
        if len(branches) < 2 or get_origin(kind) not in (Union, UnionType) or error not in _NUMBER:
            return f"got {shown}, allowed is {message}{', or null' if none else ''}"
        items = [one for branch in branches for one in _refusal(branch)]
    return f"got {shown}, allowed is {_any_of(items, none=none)}"


_NUMBER = ("int_type", "float_type")
"""What `Config` itself says of True, before any branch has seen it."""


def _refusal(kind: Any) -> list[Any]:
    """The errors of a value that no type takes."""
    try:
        TypeAdapter(kind).validate_python(object())
    except ValidationError as error:
        return list(error.errors())
    return []


def _any_of(items: Iterable[Any], *, none: bool) -> str:
    """What the branches of a union allow: "a valid number, 'auto' or null"."""
    words: list[str] = []
    for item in items:
        said = _allowed(item["type"], str(item["msg"]))
        literal = item["type"] == "literal_error"
        words += said.replace(" or ", ", ").split(", ") if literal else [said]
    *first, last = dict.fromkeys([*words, "null"] if none else words)
    return f"{', '.join(first)} or {last}" if first else last


def _allowed(kind: str, said: str) -> str:
    """What pydantic says of a value, so that it goes on from "allowed is"."""
    if kind in ("model_type", "dict_type"):
        return "a section: keys with values"
    if kind in ("tuple_type", "list_type"):
        return "a list: values in brackets"
    said = said.removeprefix("Value error, ").split(", unable to ", 1)[0]
    said = re.sub(r"^(Input|String|Tuple|List) should (be|have) ", "", said)
    return re.sub(r" after validation, not \d+$", "", said)


def _whole(cls: type[BaseModel], path: _Path) -> str:
    """What is allowed where a number has more digits than pydantic reads."""
    field = _model_at(cls, path[:-1]).model_fields.get(str(path[-1])) if path else None
    bounds: dict[str, Any] = {}
    for each in field.metadata if field else ():
        bounds |= {name: getattr(each, name) for name in ("ge", "le") if hasattr(each, name)}
    words = [f"{word} {bounds[x]}" for x, word in (("ge", "from"), ("le", "to")) if x in bounds]
    return " ".join(["a whole number", *words]) if words else "a whole number of 64 bits"


def _model_at(cls: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel]:
    """The config class that `path` leads to; the last one found where the path leaves configs."""
    for key in path:
        field = cls.model_fields.get(str(key))
        if field is None:
            break
        found = _config_in(field.annotation)
        if found is None:
            break
        cls = found
    return cls


def _config_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _config_in(argument)
        if found is not None:
            return found
    return None
