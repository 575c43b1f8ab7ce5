import base64
import hashlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

from lezero.core.errors import FileError
from lezero.report import LinePlot, Page, Series, Tile

EVIL = "</style></script><script>alert('x')</script><img src=http://evil/x onerror=alert(1)>\"'&"


def full_page(text):
    page = Page(text, text, text)
    page.tiles([Tile(text, text, text, text), Tile("b", "1", "n", "good")])
    for _ in range(3):
        section = page.section(text)
        section.text(text)
        section.note(text, tone=text)
        section.missing(text)
        section.table((text, "n"), [(text, text), (text, 1)], numbers="-n")
        section.facts({text: text})
        section.code(text, title=text, open=False)
        section.plots(LinePlot(text, [Series(text, [1, 2], [3, 4])], x_label=text, unit=text))
    return page


def parsed(page):
    first, rest = page.render().split("\n", 1)
    assert first == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


def test_hostile_text_stays_text():
    root = parsed(full_page(EVIL))
    assert len(list(root.iter("script"))) == 1
    assert not list(root.iter("img"))
    assert not any(name.startswith("on") for e in root.iter() for name in e.attrib)
    assert root.find("head/title").text == EVIL
    assert EVIL in [e.text for e in root.iter("code")]


def test_nothing_is_loaded_and_the_policy_forbids_it():
    html = full_page("a").render()
    root = ElementTree.fromstring(html.split("\n", 1)[1])
    for element in root.iter():
        for name in ("src", "href", "data", "action"):
            value = element.get(name, "")
            assert not value or value.startswith(("#", "data:"))
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html
    assert "@import" not in html
    policy = next(m.get("content") for m in root.iter("meta") if m.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for kind in ("style", "script"):
        text = next(root.iter(kind)).text
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not any("style" in e.attrib for e in root.iter())


def test_light_dark_phone_and_print():
    html = full_page("a").render()
    for rule in ("prefers-color-scheme: dark", "max-width: 720px", "@media print"):
        assert rule in html
    assert 'name="viewport"' in html
    names = set(re.findall(r"var\((--[a-z0-9]+)\)", html))
    assert names <= set(re.findall(r"(--[a-z0-9]+):", html))


def test_contents_link_to_sections():
    root = parsed(full_page("a"))
    ids = {e.get("id") for e in root.iter("section")}
    links = {a.get("href")[1:] for a in root.iter("a")}
    assert links == ids == {"s1", "s2", "s3"}


def test_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "p.html"
    target.write_text("old")
    assert full_page("\ud800 ü").write(target) == target
    assert "ü" in target.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["p.html"]

    class Broken:
        def render(self):
            raise RuntimeError("while drawing")

    page = Page("x")
    with pytest.raises(RuntimeError):
        page.section("s").plots(Broken())
    with pytest.raises(FileError, match=r"gone.*cannot be written"):
        page.write(tmp_path / "gone" / "p.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError):
        page.write(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "p.html"]
