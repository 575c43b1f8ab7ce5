"""Chat templates render as in transformers, and fail with an error of LeZero."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum, IntEnum
from importlib import metadata
from types import MappingProxyType

import numpy as np
import pydantic
import pytest

from lezero.core.errors import ConfigError, LeZeroError
from lezero.serve import template as of_templates
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.language import LanguageFace
from lezero.serve.template import render
from tests.serve.server.running import small_llm

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " héllo <x> "},
    {"role": "assistant", "content": "ok"},
]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
SAME = [
    "{{ add_generation_prompt }}{% if add_generation_prompt %}<assistant>{% endif %}",
    "a\n  {% if true %}\nb\n  {% endif %}\nc",
    "{% if tools is not none %}TOOLS{% endif %}{{ messages[0].content }}",
    "{% if tools %}T{% endif %}{% if documents is none %}no documents{% endif %}",
    "{{ strftime_now('%Y') }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\n"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}-{% endif %}{% endfor %}",
    "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}",
    "{{ messages[1] | tojson }}{{ messages[0] | tojson(indent=2) }}{{ '<b>&' | tojson }}",
    "{{ messages | tojson(ensure_ascii=False) }}{{ messages[1] | tojson(true, 1) }}",
    "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
    "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}",
    "{% set s = namespace(n=2) %}{{ s.n }}",
    "{% set s = namespace({'a': 1}, self=2) %}{% set s.b = 3 %}{{ s.a + s['self'] + s.b }}",
    "{{ dict(a=1, **{'b': 2}) | tojson }}{{ dict([('c', 3)]) }}{{ dict.fromkeys('ab', 1) }}",
    "{% for m in messages %}\n  {{ m.role }}\n{% endfor %}\n",
    "{{ bos_token }}{{ messages[1].content.strip() }}{{ unk_token is defined }}",
    "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}yes",
]


@pytest.mark.parametrize("template", SAME)
def test_as_transformers_renders_it(template: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, **SPECIALS
    )
    assert render(template, MESSAGES, SPECIALS) == expected[0]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 5 }}", "chat template fails"),
        ("{{ 1 / 0 }}", "chat template fails"),
        ("{{ messages[0].nope.deeper }}", "chat template fails"),
        ("{% if %}", "chat template fails"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='user') }}", "unsafe"),
        ("{{ dict.update(messages[0], {'role': 'user'}) }}", "chat template fails"),
        ("{{ dict.mro() }}", "chat template fails"),
        ("{{ namespace(__init__=1) }}", "begins with _, as '__init__'"),
        ("{% set s = namespace() %}{% set s.__call__ = 1 %}", "begins with _, as '__call__'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template fails"),
        ("{% for a in [1] %}" * 25 + "x" + "{% endfor %}" * 25, "too many statically nested"),
        ("{{ 'a' * 100000000000000 }}", "fails: it takes more than 1,024 MiB"),
    ],
)
def test_what_fails_is_an_error_of_the_messages(template: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"messages: .*{says}"):
        render(template, MESSAGES, SPECIALS)


class Role(str, Enum):  # noqa: UP042 (whose str() is its name)
    USER = "user"


class Level(IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Call:
    name: str
    weight: object


class Part(pydantic.BaseModel):
    text: str


TOJSON = "{% for m in messages %}{{ m | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].role }}{{ messages[0].role | tojson }}",
        "{{ messages[0].level }}{{ messages[0].share }}{{ messages[0].calls[0].name }}",
        "{% if messages[0].no %}x{% endif %}{{ messages[0].pair }}{{ messages[0].image }}",
        TOJSON,
    ],
)
def test_messages_are_plain_copies_as_in_transformers(template: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    message = {
        "role": Role.USER,
        "content": "a",
        "level": Level.HIGH,
        "share": np.float64(0.5),
        "no": np.bool_(False),
        "calls": [Call("f", np.int32(3)), Part(text="b")],
        "pair": (1, MappingProxyType({Role.USER: None}), {2: (), None: {"lezero tuple": 1}}),
        "image": np.zeros(2),
    }
    asked = [message, {"role": "user", "content": "b", "reasoning": "why"}]
    expected, _ = utils.render_jinja_template([asked], chat_template=template)
    assert render(template, asked, {}) == expected[0]
    assert message["role"] is Role.USER


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_read_under_each_of_its_names(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    asked = [{"role": "assistant", "content": "b", "thinking": None, name: "why"}]
    expected, _ = utils.render_jinja_template([asked], chat_template=TOJSON)
    assert render(TOJSON, asked, {}) == expected[0]
    template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking is none }}"
    assert render(template, asked, {}).startswith("why")


@pytest.fixture
def fresh_process() -> Iterator[None]:
    of_templates._process.cache_clear()
    yield
    of_templates._process.cache_clear()


@pytest.mark.usefixtures("fresh_process")
@pytest.mark.parametrize(
    ("version", "is_sound"),
    [("3.1.5", False), ("3.1", False), ("2.11.3", False), ("3.1.6", True), ("3.10.0rc1", True)],
)
def test_a_sandbox_with_known_ways_out_is_not_used(
    monkeypatch: pytest.MonkeyPatch, version: str, is_sound: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if is_sound:
        assert render("a", MESSAGES, {}) == "a"
        return
    says = rf"need jinja2 3\.1\.6 or newer.* {version} is installed"
    with pytest.raises(LeZeroError, match=says):
        render("a", MESSAGES, {})
    LanguageFace(small_llm(template=None), ServeConfig(), "m")
    with pytest.raises(LeZeroError, match=says):
        LanguageFace(small_llm(template="a"), ServeConfig(), "m")
