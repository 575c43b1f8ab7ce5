"""HTML from parts: whatever is not `Markup` already is text, and text is escaped.

The result is also well-formed XML, which lets a test parse it strictly.
"""

from __future__ import annotations

import re

VOID = frozenset({"br", "hr", "meta", "link", "rect", "line", "circle", "path"})
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})


class Markup(str):
    """A string that is HTML already. Only `tag`, `join` and `escape` make one."""

    __slots__ = ()


def plain(text: object) -> str:
    """`text` without control characters and broken surrogates, safe for a page or a terminal.

    Line feeds and tabs stay; `\\r\\n` becomes `\\n`; each other one shows as U+FFFD.
    """
    return _CONTROL.sub("\ufffd", str(text).replace("\r\n", "\n"))


def escape(text: object) -> Markup:
    """`text` as HTML that shows exactly that text."""
    return Markup(plain(text).translate(_ENTITIES))


def join(*children: object) -> Markup:
    """The children one after another; those that are no `Markup` are escaped."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c) for c in children))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element. `class_` is `class`, `_` in names is `-`; attributes that are None are left out.

    `tag("p", "a < b", class_="note")` is `<p class="note">a &lt; b</p>`.
    """
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    opening = f"<{name}{''.join(parts)}"
    if name in VOID and not children:
        return Markup(f"{opening}/>")
    return Markup(f"{opening}>{join(*children)}</{name}>")
