"""Headless Chromium, spoken to over its debugging pipe; no package is needed for it.

The protocol is Chrome's DevTools Protocol: JSON messages that end with a zero byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any, Self

_PATIENCE_S = 40.0


class Browser:
    """One tab. problems: errors and refused loads that the page had."""

    def __init__(self, command: str, folder: Path) -> None:
        self.problems: list[str] = []
        self._number, self._held, self._session = 0, b"", ""
        low_read, self._to = os.pipe()
        self._from, low_write = os.pipe()
        # Away from 3 and 4, which the shell below writes over.
        to_read, to_write = (fcntl.fcntl(x, fcntl.F_DUPFD, 10) for x in (low_read, low_write))
        os.close(low_read)
        os.close(low_write)
        words = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--disable-crash-reporter"),
            *("--disable-component-update", "--hide-scrollbars", "--no-zygote"),
            *("--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"),
        ]
        # Chromium reads orders from descriptor 3 and writes answers to 4.
        script = f'exec 3<&{to_read} 4>&{to_write} {to_read}<&- {to_write}>&-; exec "$@"'
        home = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        self._process = subprocess.Popen(
            ["bash", "-c", script, "-", command, *words],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=home,
        )
        os.close(to_read)
        os.close(to_write)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._process.poll() is None:
                self._order("Browser.close", browser=True)
            self._process.wait(15)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def open(self, url: str, width: int, height: int, scheme: str = "light") -> None:
        target = self._order("Target.createTarget", {"url": "about:blank"}, browser=True)
        asked = {"targetId": target["targetId"], "flatten": True}
        self._session = self._order("Target.attachToTarget", asked, browser=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._order(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._order("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._order("Emulation.setEmulatedMedia", {"features": features})
        self._order("Page.navigate", {"url": url})
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        found = self._order("Runtime.evaluate", {"expression": script, "returnByValue": True})
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not self.run(script):
            assert time.monotonic() < end, f"the page never came to: {script}"
            time.sleep(0.03)

    def picture(self, path: Path) -> None:
        data = self._order("Page.captureScreenshot", {"format": "png"})["data"]
        path.write_bytes(base64.b64decode(data))

    def _order(self, method: str, params: Any = None, *, browser: bool = False) -> Any:
        self._number += 1
        order: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if not browser:
            order["sessionId"] = self._session
        os.write(self._to, json.dumps(order).encode() + b"\0")
        while (found := self._next()).get("id") != self._number:
            self._note(found)
        assert "error" not in found, found
        return found["result"]

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(event["params"]["exceptionDetails"])[:500])
        if event.get("method") == "Log.entryAdded":
            entry = event["params"]["entry"]
            if entry["level"] == "error":
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE_S)
            assert ready, "Chromium does not answer"
            piece = os.read(self._from, 1 << 16)
            assert piece, "Chromium has ended"
            self._held += piece
        message, _, self._held = self._held.partition(b"\0")
        found = json.loads(message)
        assert isinstance(found, dict)
        return found
