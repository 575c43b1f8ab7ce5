"""The process that renders chat templates: what `template_process` runs, and speaks with.

[Note: what a template may touch] Jinja's sandbox judges an object by its class and its attributes.
It does not know what methods of a caller's objects do, so messages reach a template as plain
copies. It keeps a template from changing a list or a dict that it holds, but not from calling
`dict.update` of the class with it, and takes what a namespace answers for attributes of that
object, underscored ones too; so `dict` is no class here, and a namespace holds no such names.

[Note: what a template may take] The sandbox does not keep a template from running for ever or from
filling the memory. The system does: it ends this process where one rendering takes more than its
seconds of a processor, and (on Linux) gives it no more than `MEMORY`.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lezero.serve.template_process import (
    FAILED,
    PAIRS,
    READY,
    REFUSED,
    SIZE,
    TEXT,
    TUPLE,
    write_all,
)

MEMORY = 1 << 30
MOST = 1 << 24
"""Letters of a prompt."""


class Refused(Exception):
    """What the template says of the messages."""


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote, for training."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """What `dict` does in templates; see [Note: what a template may touch]."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Named(Namespace):
    """What `namespace` does in templates; see [Note: what a template may touch]."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace takes no name that begins with _, as {name!r}")
        Namespace.__setitem__(self, name, value)


def _namespace(*args: Any, **attributes: Any) -> _Named:
    made = _Named()
    for name, value in dict(*args, **attributes).items():
        made[name] = value
    return made


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
    raise Refused(text)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "dict": _Dict(),
        "namespace": _namespace,
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _told(found: dict[str, Any]) -> Any:
    if PAIRS in found:
        return dict(found[PAIRS])
    return tuple(found[TUPLE]) if TUPLE in found else found


def answer(asked: bytes) -> tuple[bytes, str]:
    """As `TemplateProcess.ask` gives it."""
    broken = (
        *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
        *(SyntaxError, RuntimeError),  # nested too deep
    )
    try:
        told = asked.decode("utf-8", "surrogatepass")
        template, messages, specials = json.loads(told, object_hook=_told)
        text = _compiled(template).render(
            messages=messages, add_generation_prompt=True, tools=None, documents=None, **specials
        )
    except Refused as error:
        return REFUSED, str(error)[:MOST]
    except MemoryError:
        return FAILED, f"it takes more than {MEMORY >> 20:,} MiB"
    except broken as error:
        return FAILED, (str(error) or type(error).__name__)[:MOST]
    if len(text) > MOST:
        return FAILED, f"it writes {len(text):,} letters, allowed are {MOST:,}"
    return TEXT, text


def main(fd: int, seconds: float) -> None:
    """Renders what it is asked for, until nobody asks. fd: where answers go. seconds: of a
    processor, for one answer."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the process did that started this one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        room = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    asks, answers = sys.stdin.buffer, os.fdopen(fd, "wb", buffering=0)
    answers.write(READY)
    while size := asks.read(SIZE):
        asked = asks.read(int.from_bytes(size, "big"))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # which ends the process, whatever it does
        kind, text = answer(asked)
        made = text.encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_all(answers, kind + len(made).to_bytes(SIZE, "big") + made)
