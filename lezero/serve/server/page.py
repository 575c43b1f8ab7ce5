"""The page at `/`: one file with everything in it, which loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path


@cache
def page() -> tuple[bytes, str]:
    """The page, and a content security policy that lets only its own style and script run."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    style, script = (_digest(text, tag) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _digest(text: str, tag: str) -> str:
    (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
