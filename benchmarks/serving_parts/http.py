"""What HTTP adds to a token: streams of `lz serve` beside the engine alone, the same prompts.

Both wait in processes of their own and are asked in turns: the engine by lines on its stdin, the
server by this process over sockets. One stream counts from the first event to the last; eight at
once from the questions to the last event. What the client itself takes counts against the server.
Each round compares one with the other, so fewer rounds on a slow machine only leave more to chance;
their number is told. `pause_ms`: how much longer a short answer takes whose question comes after a
pause than one asked at once, since threads that sleep must wake, the client's too; `busy_ratio`:
answers beside as many busy processes as there are cores, over those before. Of both the prompt is
in the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving_parts.served import ROOT, Served, serving, tiny

PROMPT, NEW, NEW_MANY, TOGETHER = 32, 128, 32, 8
ROUNDS, LEAST, SECONDS = 15, 5, 60.0
"""Rounds at most; after so many seconds no further one begins, but there are `LEAST`."""
ROUNDS_QUICK = 5
PAUSE_S, SHORT, PAUSES = 0.1, 8, 15
"""A pause, the tokens of the answer after it, and how often."""
CONTEXT = 1024


def run(quick: bool, place: str = "", weights: str = "int8") -> dict[str, Any]:
    """Medians over rounds: `http_overhead` of one stream, and `http_overhead_8` of eight at once,
    shares of the engine's own time; and the milliseconds a token that they are made of.

    place: a model's folder; not used when `quick`, which takes a tiny model.
    """
    with tempfile.TemporaryDirectory() as folder:
        if quick:
            place, weights = tiny(Path(folder)), "bf16"
        with _engine(place, weights) as engine, _served(place, weights) as server:
            _round(engine, server, -1)  # builds and warms
            found = _figures(list(_rounds(engine, server, ROUNDS_QUICK if quick else ROUNDS)))
            return found | _after_pauses(server) | _beside_others(server)


def _rounds(engine: subprocess.Popen[str], server: Served, most: int) -> Iterator[dict[str, float]]:
    end = time.monotonic() + SECONDS
    for number in range(most):
        if number >= LEAST and time.monotonic() > end:
            return
        yield _round(engine, server, number)


def _after_pauses(server: Served) -> dict[str, float]:
    """`pause_ms`: medians of answers after a pause and at once, in turns."""
    took: dict[float, list[float]] = {0.0: [], PAUSE_S: []}
    for pause, times in PAUSES * list(took.items()):
        time.sleep(pause)
        times.append(_answered(server, SHORT))
    at_once, after = (statistics.median(times) for times in took.values())
    return {"pause_ms": 1000 * (after - at_once)}


def _beside_others(server: Served) -> dict[str, float]:
    """`busy_ratio`: medians of answers beside busy processes and without them."""
    alone = statistics.median(_answered(server, NEW) for _ in range(PAUSES))
    spin = [sys.executable, "-c", "while True: pass"]
    others: list[subprocess.Popen[bytes]] = []
    try:
        others += (subprocess.Popen(spin) for _ in os.sched_getaffinity(0))
        beside = statistics.median(_answered(server, NEW) for _ in range(PAUSES))
    finally:
        for process in others:
            process.kill()
            process.wait()
    return {"busy_ratio": beside / alone}


def _answered(server: Served, new: int) -> float:
    """Seconds of one whole answer."""
    began = time.perf_counter()
    _streams(server, [_prompt(0)], new)
    return time.perf_counter() - began


def _figures(found: list[dict[str, float]]) -> dict[str, Any]:
    medians = {key: statistics.median(row[key] for row in found) for key in found[0]}
    one = statistics.median(row["http_ms"] / row["engine_ms"] - 1 for row in found)
    many = statistics.median(row["http_8_ms"] / row["engine_8_ms"] - 1 for row in found)
    return {
        "http_overhead": one,
        "http_overhead_8": many,
        "http_rounds": len(found),
        **{key: float(f"{value:.4g}") for key, value in medians.items()},
    }


def _served(place: str, weights: str) -> contextlib.AbstractContextManager[Served]:
    return serving(place, weights, "--context", str(CONTEXT), "--cache-mib", "128")


def _round(engine: subprocess.Popen[str], server: Served, number: int) -> dict[str, float]:
    """One stream and eight, of prompts that no other round has, each way; who is first changes."""
    one = [_prompt(100 * number)]
    many = [_prompt(100 * number + index) for index in range(1, TOGETHER + 1)]
    ways = {
        "engine_ms": lambda: _ask_engine(engine, one, NEW),
        "http_ms": lambda: _stream(server, one[0], NEW),
        "engine_8_ms": lambda: _ask_engine(engine, many, NEW_MANY),
        "http_8_ms": lambda: _streams(server, many, NEW_MANY),
    }
    names = list(ways)
    order = [names[i] for i in ((1, 0, 3, 2) if number % 2 else (0, 1, 2, 3))]
    return {name: 1000 * ways[name]() for name in order}


def _prompt(seed: int) -> list[int]:
    import random

    drawn = random.Random(seed)
    return [drawn.randrange(10, 256) for _ in range(PROMPT)]


def _question(prompt: list[int], new: int) -> dict[str, Any]:
    fields = {"max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    return {"prompt": prompt, **fields}


def _stream(server: Served, prompt: list[int], new: int) -> float:
    """Seconds a token of one stream, from its first event to its last."""
    with server.begin(_question(prompt, new)) as connection:
        found = bytearray()
        while b"data: " not in found:
            found += _received(connection)
        began = time.perf_counter()
        while b"data: [DONE]" not in found[-64:]:
            found += _received(connection)
        took = time.perf_counter() - began
    _check(bytes(found))
    return took / (new - 1)


def _streams(server: Served, prompts: list[list[int]], new: int) -> float:
    """Seconds a token of several streams at once, from the questions to the last event."""
    began = time.perf_counter()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for prompt in prompts:
            connection = stack.enter_context(server.begin(_question(prompt, new)))
            selector.register(connection, selectors.EVENT_READ, bytearray())
        left = len(prompts)
        while left:
            for key, _ in selector.select():
                key.data.extend(_received(key.fileobj))
                if b"data: [DONE]" in key.data[-64:]:
                    selector.unregister(key.fileobj)
                    _check(bytes(key.data))
                    left -= 1
    return (time.perf_counter() - began) / (new * len(prompts))


def _received(connection: Any) -> bytes:
    found: bytes = connection.recv(65536)
    if not found:
        raise RuntimeError("the server closed a stream before its end")
    return found


def _check(found: bytes) -> None:
    if b'"error"' in found or b'"finish_reason":"length"' not in found:
        raise RuntimeError(f"a stream went wrong: {found[-300:].decode(errors='replace')}")


@contextlib.contextmanager
def _engine(place: str, weights: str) -> Iterator[subprocess.Popen[str]]:
    """`lz.LLM` alone, in a process that answers lines of [prompts, new tokens] with seconds."""
    words = [sys.executable, "-m", "serving_parts.http", place, weights]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it is open
        yield process
        process.communicate()
    finally:
        process.kill()
        process.wait()


def _ask_engine(engine: subprocess.Popen[str], prompts: list[list[int]], new: int) -> float:
    assert engine.stdin is not None
    assert engine.stdout is not None
    print(json.dumps([prompts, new]), file=engine.stdin, flush=True)
    return float(engine.stdout.readline())


def _answer_lines(place: str, weights: Any) -> None:
    """The engine's side of `_ask_engine`: one prompt as a stream, several as one batch."""
    from lezero.serve.llm import LLM
    from lezero.serve.sampling import SamplingParams

    llm = LLM(place, weights=weights, context=CONTEXT, cache_bytes=128 << 20)
    print("open", flush=True)
    for line in sys.stdin:
        prompts, new = json.loads(line)
        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        if len(prompts) == 1:
            pieces = llm.stream(prompts[0], params)
            next(pieces)
            began = time.perf_counter()
            for _ in pieces:
                pass
            took = (time.perf_counter() - began) / (new - 1)
        else:
            began = time.perf_counter()
            llm.generate(prompts, params)
            took = (time.perf_counter() - began) / (new * len(prompts))
        print(took, flush=True)


if __name__ == "__main__":
    _answer_lines(*sys.argv[1:])
