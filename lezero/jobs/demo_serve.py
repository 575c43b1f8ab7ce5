"""The demo's end: the quantized model behind `lz serve`, asked once over HTTP, ended by SIGTERM."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lezero.core.errors import LeZeroError, need_extra

_NAME = "demo"
_START_S, _ANSWER_S, _END_S = 120.0, 60.0, 30.0
_END = signal.SIGTERM
# A model of two minutes knows few words: what is less likely it gets wrong.
SAMPLING = {"max_tokens": 64, "temperature": 0.8, "top_p": 0.9, "seed": 1}


def refuse_without_server() -> None:
    """Raises `MissingExtraError` where nothing could be served."""
    if importlib.util.find_spec("uvicorn") is None:
        raise need_extra("serve", "uvicorn", "lz demo")


def serve_and_ask(model: Path, prompt: str) -> Iterator[str]:
    """Serves the model at a free port, asks it to continue `prompt`, and ends it; lines for people.

    Raises `LeZeroError` where the server does not start, or does not end with status 0.
    """
    with _serving(model) as server:
        assert server.stdout is not None
        said = _until_it_serves(server)
        url = f"{said['serving'].split()[0]}/v1"
        yield f"address     {url} (OpenAI's protocol)"
        yield f"question    continue {prompt!r}"
        how, text = _ask(url, prompt)
        answer = textwrap.wrap(" ".join(text.split()), 66) or ["(nothing)"]
        yield f"answer      {answer[0]}"
        yield from (f"{'':<12}{line}" for line in answer[1:])
        yield f"asked       {how}"
        server.send_signal(_END)
        ended = _lines(server.stdout.read().splitlines())
        status = server.wait(_END_S)
        if status:
            raise LeZeroError(f"the server of the demo ended with status {status} after SIGTERM")
        yield f"forecast    {said.get('tried') or said['decode']}"
        yield f"measured    {ended.get('drawn', 'nothing: no request had steps of its own')}"
        yield "server      ended cleanly (SIGTERM, exit status 0)"


@contextmanager
def _serving(model: Path) -> Iterator[subprocess.Popen[str]]:
    """`lz serve` in a process that does not outlive this, and that is killed where it hangs."""
    words = ["-m", "lezero", "serve", str(model), "--port", "0", "--name", _NAME]
    server = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    killer = threading.Timer(_START_S + _ANSWER_S + _END_S, server.kill)
    killer.start()
    try:
        yield server
    finally:
        killer.cancel()
        killer.join()
        if server.poll() is None:
            server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


def _until_it_serves(server: subprocess.Popen[str]) -> dict[str, str]:
    """What the server says up to its address, by the first word of each line."""
    assert server.stdout is not None
    lines: list[str] = []
    for line in server.stdout:
        lines.append(line)
        if line.startswith("serving"):
            return _lines(lines)
    raise LeZeroError(f"the server of the demo ended with status {server.wait()} before it served")


def _lines(said: list[str]) -> dict[str, str]:
    pairs = [line.strip().partition(" ") for line in said]
    return {word: rest.strip() for word, _, rest in pairs}


def _ask(url: str, prompt: str) -> tuple[str, str]:
    """How it was asked, and the answer."""
    try:
        import openai
    except ImportError:
        how = "over plain HTTP, since the package openai is not installed"
        return how, _ask_plainly(url, {"prompt": prompt, **SAMPLING})
    with openai.OpenAI(base_url=url, api_key="none", timeout=_ANSWER_S) as client:
        found = client.completions.create(model=_NAME, prompt=prompt, extra_body=SAMPLING)
    return "through the package openai", found.choices[0].text


def _ask_plainly(url: str, question: dict[str, Any]) -> str:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(question).encode(), headers)
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as found:
        return str(json.load(found)["choices"][0]["text"])
