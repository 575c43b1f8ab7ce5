"""A chat template ends, and takes no more room than its process has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lezero.core.errors import ConfigError, LeZeroError
from lezero.serve import template, template_process
from lezero.serve.template import render
from lezero.serve.template_process import TEXT, Ended, TemplateProcess

MESSAGES = [{"role": "user", "content": "a", "at": 1_700_000_000}, {"role": "b", "content": "c"}]
MANY = "range(99999)"
DOUBLED = (
    "{% set s = namespace(d=[1], e=[1], t=(1,)) %}{% for i in range(60) %}"
    "{% set s.d = [s.d, s.d] %}{% set s.e = [s.e, s.e] %}{% set s.t = (s.t, s.t) %}{% endfor %}"
)
ENDLESS = [
    f"{{% for a in {MANY} %}}" * 3 + "{% endfor %}" * 3,
    f"{{% for a in {MANY} %}}{{{{ {MANY}|map('upper')|list|length }}}}{{% endfor %}}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    DOUBLED + "{{ {s.t: 1}|length }}",
    DOUBLED + "{{ s.d == s.e }}",
    "{{ 9 ** 99999999 }}",
]
LARGE = [
    "{{ 'a' * 3000000000 }}",
    "{{ ([1] * 500000000)|length }}",
    "{{ messages|tojson(indent=300000000) }}",
    "{{ '{:>3000000000}'.format(1) }}",
    "{{ '%*d' % (3000000000, 1) }}",
    "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
    "{{ (['a' * 100000] * 100000)|join }}",
    "{% set a = 'a' * 1000000 %}{% for i in range(9999) %}{{ a }}{% endfor %}",
]
SAME = [
    "{% for m in messages %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{{ loop.revindex0 }}"
    "{{ loop.previtem is defined }}{{ loop.changed(m.role) }}{{ loop.cycle(1, 2) }}{% endfor %}",
    "{% for m in missing %}{{ m }}{% else %}none{% endfor %}",
    "{% for m in [1, [2, [3]]] recursive %}{% if m is iterable %}({{ loop(m) }}){% else %}"
    "{{ m }}{{ loop.depth }}{% endif %}{% endfor %}",
    "{% macro m(x) %}<{{ x }}>{{ caller() if caller }}{% endmacro %}{{ m(messages[0].at) }}"
    "{% call m(1) %}in{% endcall %}{% set x %}{{ m(2) }}{% endset %}{{ x }}",
    "{{ '20260101 %s'|format(1) }}{{ '50%% %s' % 'x' }}{{ '{:>4}{}'.format(1, messages[0].at) }}",
    "{% autoescape true %}{{ '<a>' ~ ('<b>'|safe) }}{% endautoescape %}",
    "{{ '\ud800 é' }}{{ 1.25|round(1) }}{{ lipsum is defined }}",
]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    """A process that gives templates a fifth of a second."""
    process = TemplateProcess(seconds=0.2)
    monkeypatch.setattr(template, "_process", lambda: process)
    yield process
    process.close()


@pytest.mark.parametrize("endless", ENDLESS)
def test_a_template_without_an_end_is_ended(endless: str, impatient: TemplateProcess) -> None:
    says = r"messages: .* does not end within 0\.2 s of processor time; take another one"
    with pytest.raises(ConfigError, match=says):
        render(endless, MESSAGES, {})
    assert render("{{ messages[0].role }}", MESSAGES, {}) == "user"


@pytest.mark.parametrize("how", ["blocked", "ignored"])
def test_it_ends_whatever_the_process_does_with_signals(how: str) -> None:
    before = signal.getsignal(signal.SIGPROF)
    try:
        if how == "ignored":
            signal.signal(signal.SIGPROF, signal.SIG_IGN)
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
        process = TemplateProcess(seconds=0.2)
        process.ask(b'["a", [], {}]')
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.signal(signal.SIGPROF, before)
    late = threading.Timer(60, process.close)  # so that this fails where it would wait for ever
    late.start()
    with pytest.raises(Ended, match=r"does not end within 0\.2 s"):
        process.ask(json.dumps([ENDLESS[0], [], {}]).encode())
    late.cancel()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process has no bound here")
@pytest.mark.parametrize("large", LARGE)
def test_a_template_that_takes_too_much_room_is_ended(large: str) -> None:
    with pytest.raises(ConfigError, match=r"messages: .* fails: it takes more than 1,024 MiB"):
        render(large, MESSAGES, {})


def test_a_text_that_no_model_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="it writes 20,000,000 letters, allowed are 16,777,216"):
        render("{{ 'a' * 20000000 }}", MESSAGES, {})


@pytest.mark.parametrize("usual", SAME)
def test_what_usual_templates_do_is_as_in_transformers(usual: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template([MESSAGES], chat_template=usual)
    assert render(usual, MESSAGES, {}) == expected[0]


def test_messages_that_are_nested_too_deep_are_refused() -> None:
    deep: list[object] = []
    for _ in range(150):
        deep = [deep]
    assert "[[[" in render("{{ messages[0].content }}", [{"role": "user", "content": deep}], {})
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested too deep"):
        render("{{ messages[0].content }}", [{"role": "user", "content": deep}], {})


def test_threads_each_get_their_own_answer() -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            text = render("{{ messages[0].x }}" + " " * number, [{"x": str(number) * 9999}], {})
            found[number] = found.get(number, "") + text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: (str(n) * 9999 + " " * n) * 20 for n in range(8)}


def test_a_question_that_is_interrupted_leaves_no_answer_behind(
    monkeypatch: pytest.MonkeyPatch, impatient: TemplateProcess
) -> None:
    def interrupted(pipe: object, count: int) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(template_process, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render("first", MESSAGES, {})
    assert render("second", MESSAGES, {}) == "second"


def test_a_process_that_ended_by_itself_is_started_anew(impatient: TemplateProcess) -> None:
    assert render("first", MESSAGES, {}) == "first"
    assert impatient._child is not None
    impatient._child.process.kill()
    impatient._child.process.wait()
    assert render("second", MESSAGES, {}) == "second"


def test_it_ends_with_the_process_that_asked() -> None:
    code = (
        "import os; from lezero.serve import template as t; t.render('a', [], {});"
        "print(t._process()._child.process.pid, flush=True); os._exit(0)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid = int(out.stdout)
    for _ in range(500):
        if not os.path.exists(f"/proc/{pid}"):
            return
        threading.Event().wait(0.02)
    raise AssertionError("it still runs")


def test_a_forked_process_has_one_of_its_own() -> None:
    assert render("{{ 1 }}", [], {}) == "1"
    parent = template._process()._child
    assert parent is not None
    if (forked := os.fork()) == 0:
        try:
            own = render("{{ 2 }}", [], {}) == "2"
            child = template._process()._child
            other = child is not None and child.process.pid != parent.process.pid
            template._process().close()
            os._exit(0 if own and other else 1)
        finally:
            os._exit(2)
    assert os.waitpid(forked, 0)[1] == 0
    assert render("{{ 3 }}", [], {}) == "3"
    assert template._process()._child is parent


def test_where_no_process_can_be_started_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(
        LeZeroError, match=r"a process of their own, .* cannot be started: .*nowhere"
    ):
        TemplateProcess().ask(b"")


def test_what_lies_in_the_working_folder_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "jinja2", "signal"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in an interactive Python
    process = TemplateProcess()
    assert process.ask(b'["a", [], {}]') == (TEXT, "a")
    process.close()
    assert not (tmp_path / "ran").exists()


def test_what_is_printed_at_its_start_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello to you all')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = TemplateProcess()
    assert process.ask(b'["a", [], {}]') == (TEXT, "a")
    process.close()


def test_one_that_ends_before_it_is_ready_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_RUN", "raise SystemExit(7)")
    with pytest.raises(LeZeroError, match="ended with status 7 before it was ready"):
        TemplateProcess().ask(b"")


def test_numbers_of_too_many_digits_are_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template reads them: Exceeds the limit"):
        render("a", [{"role": "user", "content": 10**5000}], {})
