"""Chat templates of models: Jinja in a sandbox, with what transformers gives them.

Templates come with models, so they run in Jinja's sandbox. They see `messages`,
`add_generation_prompt`, the special tokens, `tools` and `documents` (none), `raise_exception`,
`strftime_now`, the filter `tojson` and the tag `generation`, as in transformers' documentation of
chat templates.

[Note: what a template may touch] The sandbox judges an object by its class and its attributes. It
does not know what methods of a caller's objects do, so messages reach a template as plain copies.
It keeps a template from changing a list or a dict that it holds, but not from calling
`dict.update` of the class with it, and takes what a namespace answers for attributes of that
object, underscored ones too; so `dict` is no class here, and a namespace holds no such names.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from typing import Any, NoReturn

import numpy as np
from pydantic import BaseModel

from lezero.core.errors import ConfigError, LeZeroError
from lezero.serve.template_budget import one_rendering

_OLDEST = (3, 1, 6)
"""Known ways out of the sandbox of older ones are public."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render(template: str, messages: Sequence[Any], specials: Mapping[str, str]) -> str:
    """The text that the model continues. Templates read what a message says as its reasoning under
    each of the names that models use. Raises `ConfigError` where the template fails."""
    from jinja2 import TemplateError

    broken = (
        *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
        *(SyntaxError, MemoryError, RuntimeError),  # nested too deep, too long, without an end
    )
    try:
        with one_rendering() as budget:
            pieces = _compiled(template).generate(
                messages=[_with_reasoning(_plain(message)) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **specials,
            )
            return budget.gathered(pieces)
    except ConfigError:
        raise
    except broken as error:
        what = str(error) or type(error).__name__
        raise ConfigError(f"messages: the model's chat template fails: {what}") from None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().compiled(template)


@functools.cache
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension

    need_sound_sandbox()
    from lezero.serve.template_bounds import BoundedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks what the assistant wrote, for training."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

        def _same(self, caller: Callable[[], str]) -> str:
            return caller()

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _json
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _namespaces()
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.close_bounds()
    return environment


def need_sound_sandbox() -> None:
    """Raises `LeZeroError` where templates would run in a sandbox with known ways out."""
    found = metadata.version("jinja2")
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise LeZeroError(
            f"chat templates need jinja2 {oldest} or newer, since they come with models and older "
            f"ones let them run any code; {found} is installed. Install it with: "
            f"pip install 'jinja2>={oldest}'"
        )


class _Dict:
    """What `dict` does in templates; see [Note: what a template may touch]."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _namespaces() -> Callable[..., Any]:
    """What `namespace` does in templates; see [Note: what a template may touch]."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class Named(Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace takes no name that begins with _, as {name!r}")
            Namespace.__setitem__(self, name, value)

    def namespace(*args: Any, **attributes: Any) -> Named:
        made = Named()
        for name, value in dict(*args, **attributes).items():
            made[name] = value
        return made

    return namespace


def _plain(value: Any) -> Any:
    """A copy in JSON's types, of subclasses too (`str(x)` of an enumeration is another text). What
    has no such form leaves the name of its type, as in transformers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = [message[name] for name in _REASONING if message.get(name) is not None]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def _json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(text: str) -> NoReturn:
    raise ConfigError(f"messages: {text}")
