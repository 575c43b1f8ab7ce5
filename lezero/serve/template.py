"""Chat templates of models: Jinja in a sandbox, with what transformers gives them.

Templates come with models, so they run in Jinja's sandbox. They see `messages`,
`add_generation_prompt`, the special tokens, `tools` and `documents` (none), `raise_exception`,
`strftime_now`, the filter `tojson` and the tag `generation`, as in transformers' documentation of
chat templates.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from lezero.core.errors import ConfigError


def render(template: str, messages: Sequence[Any], specials: Mapping[str, str]) -> str:
    """The text that the model continues. Raises `ConfigError` where the template fails."""
    from jinja2 import TemplateError

    broken = (
        *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
        *(SyntaxError, MemoryError, RuntimeError),  # nested too deep, too long, without an end
    )
    try:
        return str(
            _compiled(template).render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **specials,
            )
        )
    except ConfigError:
        raise
    except broken as error:
        what = str(error) or type(error).__name__
        raise ConfigError(f"messages: the model's chat template fails: {what}") from None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks what the assistant wrote, for training."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

        def _same(self, caller: Callable[[], str]) -> str:
            return caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


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
