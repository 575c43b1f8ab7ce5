"""Chat templates render as in transformers, and fail with an error of LeZero."""

from __future__ import annotations

import pytest

from lezero.core.errors import ConfigError
from lezero.serve.template import render

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
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template fails"),
        ("{% for a in [1] %}" * 25 + "x" + "{% endfor %}" * 25, "too many statically nested"),
        ("{{ 'a' * 100000000000000 }}", "fails: MemoryError"),
    ],
)
def test_what_fails_is_an_error_of_the_messages(template: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"messages: .*{says}"):
        render(template, MESSAGES, SPECIALS)
