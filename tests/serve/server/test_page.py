"""The page at `/`: nothing from elsewhere, and a browser that chats with the model."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lezero.serve.server.keys import new_key
from lezero.serve.server.page import page
from tests.serve.models import says
from tests.serve.server.browser import Browser
from tests.serve.server.running import serving, slow_steps, small_llm, until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
STATES = [
    *("connecting", "ready", "answering", "shutting down", "broken", "not reachable"),
    *("API key needed", "API key not known", "API key not valid"),
]


class Names(HTMLParser):
    """Everything that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.styled: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data"):
                self.loads.append(str(value))
            if name == "style" or name.startswith("on"):
                self.styled.append(f"{tag} {name}")


def test_it_loads_nothing_and_runs_only_its_own() -> None:
    body, policy = page()
    text = body.decode()
    names = Names()
    names.feed(text)
    assert names.loads == ["data:,"]
    assert names.styled == [], "the policy does not let these run"
    assert not re.search(r"https?://|//cdn|@import|url\(", text)
    assert "innerHTML" not in text
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        inner = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[0]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy


def test_it_comes_with_its_policy() -> None:
    with serving(small_llm()) as client:
        found = client.ask("/")
    assert found.status == 200
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert found.headers["content-security-policy"] == page()[1]
    assert found.headers["x-content-type-options"] == "nosniff"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("size", SIZES)
def test_a_browser_chats_with_the_model(size: str, tmp_path: Path) -> None:
    width, height = SIZES[size]
    with serving(small_llm(), name="tiny") as client, Browser(str(CHROMIUM), tmp_path) as browser:
        browser.open(client.url, width, height)
        browser.wait("at('name').textContent === 'tiny' && at('state').textContent === 'ready'")
        least = browser.run("at('text').clientHeight")
        browser.run("at('text').value = 'a line\\n'.repeat(9)")
        browser.run("at('text').dispatchEvent(new Event('input'))")
        assert least < browser.run("at('text').clientHeight") <= 0.3 * height
        ask(browser, "hello <b>there</b>", tokens=40)
        assert browser.run("at('text').clientHeight") == least
        browser.wait(f"{NOTES}.length === 1 && at('stop').hidden")
        assert browser.run("document.querySelectorAll('.turn').length") == 2
        assert browser.run("document.querySelectorAll('.turn b').length") == 0
        assert len(browser.run("document.querySelector('.turn.assistant p').textContent")) > 0
        assert " tokens" in browser.run(f"{NOTES}[0].textContent")
        browser.wait("/^[0-9.]+ [a-zµ]+$/.test(at('first').textContent)")
        room = client.ask("/stats").json["room"]
        with slow_steps(client.server.llm, 0.2):
            ask(browser, "more", tokens=400)
            browser.wait("document.querySelectorAll('.turn').length === 4")
            browser.wait("at('requests').textContent === '1 run'")
            browser.wait(f"at('queue').textContent === '0 wait; room for {room}'")
            browser.run("at('stop').click()")
            browser.wait(f"{NOTES}.length === 2 && at('stop').hidden")
            until(lambda: client.server.worker.active == 0)
        browser.wait("at('speed').textContent !== '–'")
        root = "document.documentElement"
        assert browser.run(f"{root}.scrollWidth - {root}.clientWidth") == 0, "it scrolls sideways"
        browser.picture(tmp_path / f"{size}.png")
        browser.run("at('clear').click()")
        assert browser.run("at('log').textContent").startswith("Ask something.")
        ask(browser, "again", tokens=2)
        browser.wait(f"{NOTES}.length === 1 && at('stop').hidden")
        assert "Ask something." not in browser.run("at('log').textContent")
        assert browser.problems == []
    assert (tmp_path / f"{size}.png").stat().st_size > 5000


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_what_cannot_be_answered_is_told_and_kept(tmp_path: Path) -> None:
    llm = small_llm()
    assert llm.coder is not None
    with Browser(str(CHROMIUM), tmp_path) as browser:
        with serving(llm, name="tiny") as client:
            browser.open(client.url, 360, 640)
            browser.wait("at('state').textContent === 'ready'")
            ask(browser, "one", tokens=1)
            browser.wait(f"{NOTES}.length === 1")
            note = browser.run(f"{NOTES}[0].textContent")
            assert note.endswith("1 token"), note  # no speed of one token
            browser.run("at('temperature').value = ''")
            ask(browser, "no temperature", tokens=1)
            assert browser.run("document.querySelectorAll('.turn').length") == 2
            browser.run("at('temperature').value = 0.5")
            ask(browser, "too long " * 500, tokens=1)
            browser.wait("document.querySelectorAll('.turn.error').length === 1")
            told = "[...document.querySelectorAll('.turn.error p')].pop().textContent"
            assert browser.run(told).endswith("shorten the prompt. Clear begins a new chat.")
            for tokens, clears in ((500, True), (512, False)):
                browser.run("at('text').value = ''")
                ask(browser, "how so", tokens=tokens)
                browser.wait(f"{told}.startsWith('max_tokens: got {tokens} ') && at('stop').hidden")
                assert ("prompt. Clear begins" in browser.run(told)) is clears, tokens
            says(llm.program, 1, list(llm.coder.end_tokens))
            ask(browser, "what has an empty answer", tokens=9)
            browser.wait(f"{NOTES}.length === 2 && !running")
            roles = browser.run("messages.map((message) => message.role)")
            assert roles == ["user", "assistant"] * 2
            assert browser.run("at('text').value") == ""
        ask(browser, "مرحبا", tokens=3)
        browser.wait("document.querySelectorAll('.turn.error').length === 4")
        last = "[...document.querySelectorAll('.turn p')].pop()"
        assert browser.run(f"{last}.textContent") == "The server cannot be reached."
        assert browser.run("at('text').value") == "مرحبا"
        assert browser.run("getComputedStyle(at('text')).direction") == "rtl"
        assert (
            browser.run("at('log').scrollHeight - at('log').scrollTop - at('log').clientHeight") < 2
        )


NOTES = "document.querySelectorAll('.turn small:not([hidden])')"


def ask(browser: Browser, text: str, tokens: int) -> None:
    browser.run(f"at('tokens').value = {tokens}")
    browser.run(f"at('text').value = {text!r}")
    browser.run("at('send').click()")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_it_tells_that_the_server_ends(tmp_path: Path) -> None:
    llm = small_llm(longest=8192)
    with serving(llm, name="tiny") as client, Browser(str(CHROMIUM), tmp_path) as browser:
        browser.open(client.url, 1280, 800)
        browser.wait("at('state').textContent === 'ready'")
        with slow_steps(llm):
            running = client.begin({"prompt": "abc", "max_tokens": 8000, "ignore_eos": True})
            browser.wait("at('state').textContent === 'answering'")
            client.server.stop()
            browser.wait("at('state').textContent === 'shutting down'")
            running.close()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_header_and_the_tiles_stay_as_high_as_they_are(tmp_path: Path) -> None:
    page_alone = tmp_path / "page.html"
    page_alone.write_bytes(page()[0])
    tops = "['main', 'aside'].map((x) => document.querySelector(x).getBoundingClientRect().top)"
    cut = "[...document.querySelectorAll('.tile > *')].some((x) => x.scrollWidth > x.clientWidth)"
    about = "int4 weights in groups of 32, int8 activations in blocks, " * 2
    with Browser(str(CHROMIUM), tmp_path) as browser:
        for width in (320, 390, 761, 1280, 1366, 1440):
            browser.open(page_alone.as_uri(), width, 800)
            browser.wait("at('state').textContent === 'not reachable'")
            found = set()
            for number, state in enumerate(STATES):
                browser.run(f"state({state!r}, '')")
                browser.run(f"show('speed', {('–', '0 tok/s', '123,456 texts/s')[number % 3]!r})")
                found.add(tuple(browser.run(tops)))
                assert not browser.run(cut), "a label is cut off"
                browser.run(f"show('name', 'SmolLM2-135M-Instruct.Q4_1'); show('about', {about!r})")
            assert len(found) == 1, (width, found)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_long_name_leaves_room_on_a_small_phone(tmp_path: Path) -> None:
    name = "a-model-" * 20
    with serving(small_llm(), name=name) as client, Browser(str(CHROMIUM), tmp_path) as browser:
        browser.open(client.url, 320, 568)
        browser.wait("at('state').textContent === 'ready'")
        assert browser.run("at('name').title") == name
        assert browser.run("innerHeight - at('send').getBoundingClientRect().bottom") >= 0
        assert browser.run("at('log').clientHeight") > 60
        root = "document.documentElement"
        assert browser.run(f"{root}.scrollWidth - {root}.clientWidth") == 0, "it scrolls sideways"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_asks_for_the_key(tmp_path: Path, monkeypatch) -> None:
    key, line = new_key("me")
    monkeypatch.setenv("LEZERO_API_KEYS", line)
    with serving(small_llm(), name="tiny") as client, Browser(str(CHROMIUM), tmp_path) as browser:
        browser.open(client.url, 1280, 800)
        browser.wait("!at('key-label').hidden && at('state').textContent === 'API key needed'")
        ask(browser, "hello", tokens=5)
        told = "[...document.querySelectorAll('.turn.error p')].pop().textContent"
        browser.wait("document.querySelectorAll('.turn.error').length === 1")
        assert "needs an API key. It belongs in the box below." in browser.run(told)
        browser.run("at('key').value = 'wrong'")
        browser.wait("at('state').textContent === 'API key not known'")
        browser.run("at('send').click()")
        browser.wait("document.querySelectorAll('.turn.error').length === 2")
        assert "does not know this API key." in browser.run(told)
        browser.run("at('key').value = 'ключ'")
        browser.wait("at('state').textContent === 'API key not valid'")
        browser.run(f"at('key').value = {key!r}")
        browser.wait("at('state').textContent === 'ready'")
        ask(browser, "hello", tokens=5)
        browser.wait(f"{NOTES}.length === 1")
        assert browser.run("document.querySelectorAll('.turn.error').length") == 2
