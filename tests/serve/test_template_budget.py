"""A chat template ends, and takes no more room than a rendering has; loops are as in Jinja."""

from __future__ import annotations

import pytest

from lezero.core.errors import ConfigError
from lezero.serve.template import render

MESSAGES = [{"role": "user", "content": "a", "at": 1_700_000_000}, {"role": "b", "content": "c"}]
MANY = "range(99999)"
ENDLESS = [
    f"{{% for a in {MANY} %}}" * 3 + "{% endfor %}" * 3,
    f"{{% for a in {MANY} recursive %}}{{% if loop.depth < 3 %}}{{{{ loop({MANY}) }}}}{{% endif %}}"
    "{% endfor %}",
    f"{{% for a in {MANY} %}}{{{{ {MANY}|map('upper')|list|length }}}}{{% endfor %}}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
]
DOUBLED = "{%% set s = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}"
LISTS = DOUBLED % ("['a']", "{% set s.x = [s.x, s.x] %}")
LARGE = [
    "{{ 'a' * 3000000000 }}",
    "{{ ([1] * 500000000)|length }}",
    "{{ 9 ** 99999 }}",
    "{{ messages|tojson(indent=300000000) }}",
    "{{ '{:>3000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=3000000000) }}",
    "{{ '%3000000000d'|format(1) }}",
    "{{ '%*d' % (3000000000, 1) }}",
    "{{ 'a'|center(3000000000) }}",
    "{{ 'a'.zfill(3000000000) }}",
    "{{ range(10)|slice(1000000000) }}",
    "{{ 1|round(10 ** 9, 'floor') }}",
    "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
    "{{ ('a' * 100000)|replace('a', 'a' * 100000) }}",
    "{{ (['a' * 100000] * 100000)|join }}",
    "{{ ('a' * 10000).join(['a'] * 100000) }}",
    "{{ ('\\n' * 100000)|indent(100000) }}",
    "{{ ('a' * 100000).translate({97: 'a' * 1000000}) }}",
    "{{ ('\\t' * 100000).expandtabs(1000000) }}",
    "{{ ([[1] * 1000] * 1000)|sum(start=[])|tojson }}" * 2,
    DOUBLED % ("'a'", "{% set s.x = s.x ~ s.x %}"),
    DOUBLED % ("'a'", "{% set x %}{{ s.x }}{{ s.x }}{% endset %}{% set s.x = x %}"),
    LISTS + "{{ s.x }}",
    LISTS + "{{ s.x|tojson }}",
    LISTS + "{{ s.x == s.x[:] }}",
    LISTS + "{{ s.x ~ '' }}",
    LISTS + "{{ '%s' % s.x }}",
    "{% set a = 'a' * 1000000 %}{% for i in range(9999) %}{{ a }}{% endfor %}",
]
SAME = [
    "{% for m in messages %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{{ loop.revindex0 }}"
    "{{ loop.previtem is defined }}{{ loop.changed(m.role) }}{{ loop.cycle(1, 2) }}{% endfor %}",
    "{% for m in messages if m.role == 'b' %}{{ loop.index0 }}{{ loop.length }}{% endfor %}",
    "{% for m in messages if m.x %}{{ m }}{% else %}none{% endfor %}",
    "{% for m in missing %}{{ m }}{% else %}none{% endfor %}",
    "{% for m in [1, [2, [3]]] recursive %}{% if m is iterable %}({{ loop(m) }}){% else %}"
    "{{ m }}{{ loop.depth }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.last %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k ~ v }}{% if loop.index == 2 %}{% break %}{% endif %}"
    "{% endfor %}",
    "{% macro m(x) %}<{{ x }}>{{ caller() if caller }}{% endmacro %}{{ m(messages[0].at) }}"
    "{% call m(1) %}in{% endcall %}{% set x %}{{ m(2) }}{% endset %}{{ x }}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ [1, 2, 3]|sum }}{{ messages[::-1][0].role }}"
    "{{ messages|selectattr('role', 'equalto', 'b')|list|length }}{{ 'a b'.split()|last }}",
    "{{ '%5s|%d' % ('a', messages[0].at) }}{{ '{:>4}{}'.format(1, messages[0].at) }}"
    "{{ messages[0].x|default(4294967296) }}{{ [1, [2]] + [(3,)] }}{{ 2 ** 10 % 7 }}",
    "{{ messages|length in [2, 3] }}{{ 1 < 2 < 3 }}{{ 'a' not in 'abc' }}{{ {'a': [1]} == {} }}",
    "{{ 'a\nb'|indent(2) }}{{ [3, 1]|sort|first }}{{ 'x'|replace('x', 'yy') }}{{ 1.25|round(1) }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_an_end_is_ended(template: str) -> None:
    with pytest.raises(ConfigError, match=r"messages: .* does not end within 1,000,000 turns"):
        render(template, MESSAGES, {})


@pytest.mark.parametrize("template", LARGE)
def test_a_template_that_takes_too_much_room_is_ended_before(template: str) -> None:
    with pytest.raises(ConfigError, match=r"messages: .*MemoryError: .*; take another one"):
        render(template, MESSAGES, {})


@pytest.mark.parametrize("template", SAME)
def test_what_usual_templates_do_is_as_in_transformers(template: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template([MESSAGES], chat_template=template)
    assert render(template, MESSAGES, {}) == expected[0]
