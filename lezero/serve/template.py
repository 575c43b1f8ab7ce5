"""Chat templates of models: Jinja in a sandbox, with what transformers gives them.

Templates come with models, so they run in Jinja's sandbox, in a process of their own with little
time and memory (`template_child`). They see `messages`, `add_generation_prompt`, the special
tokens, `tools` and `documents` (none), `raise_exception`, `strftime_now`, the filter `tojson` and
the tag `generation`, as in transformers' documentation of chat templates.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
from pydantic import BaseModel

from lezero.core.errors import ConfigError, LeZeroError
from lezero.serve.template_process import PAIRS, REFUSED, TEXT, TUPLE, Ended, TemplateProcess

_OLDEST = (3, 1, 6)
"""Known ways out of the sandbox of older ones are public."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OTHER = "take another one (chat_template.jinja in the model's folder)"


def render(template: str, messages: Sequence[Any], specials: Mapping[str, str]) -> str:
    """The text that the model continues. Templates read what a message says as its reasoning under
    each of the names that models use. Raises `ConfigError` where the template fails."""
    try:
        asked = [_with_reasoning(_plain(message)) for message in messages]
        question = json.dumps((template, _as_json(asked), dict(specials)), ensure_ascii=False)
    except RecursionError:
        raise ConfigError("messages: they are nested too deep for a chat template") from None
    except ValueError as error:  # a whole number of too many digits
        raise ConfigError(f"messages: no chat template reads them: {error}") from None
    try:
        kind, text = _process().ask(question.encode("utf-8", "surrogatepass"))
    except Ended as error:
        raise ConfigError(f"messages: the model's chat template {error}; {_OTHER}") from None
    if kind == TEXT:
        return text
    fails = "" if kind == REFUSED else "the model's chat template fails: "
    raise ConfigError(f"messages: {fails}{text}")


@functools.cache
def _process() -> TemplateProcess:
    need_sound_sandbox()
    return TemplateProcess()


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


def _as_json(value: Any) -> Any:
    """With marks for what JSON has no form for, which `template_child` reads."""
    if isinstance(value, tuple):
        return {TUPLE: _as_json(list(value))}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value) and not value.keys() & {TUPLE, PAIRS}:
        return {key: _as_json(item) for key, item in value.items()}
    return {PAIRS: [[_as_json(key), _as_json(item)] for key, item in value.items()]}
