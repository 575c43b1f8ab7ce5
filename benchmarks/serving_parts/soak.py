"""A soak of `lz serve`: mixed load, clients that leave, poison, and every answer checked.

The engine alone answers each question first, in this process. Then threads ask the server for whole
answers and streams, completions and chats, with shared prefixes, seeds, stop strings and
log-probabilities; some leave in the middle, some send poison, and one holds connections open byte
by byte. The cache is so small that requests are preempted, and guesses are on: neither may change
an answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from serving_parts.served import Served, serving, tiny
from serving_parts.soak_poison import poison
from serving_parts.soak_questions import Asker, Question, Told

THREADS, QUESTIONS, QUICK_S = 10, 60, 6.0
CONTEXT, CACHE_MIB, TINY_CACHE_MIB = 1024, 6, 1
_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
_SHOWN, _LONG = 10, 1000


def run(
    quick: bool, seconds: float = 600, place: str = "", weights: str = "int8"
) -> dict[str, Any]:
    """Counts of what was asked and went wrong; `soak_memory_growth` in MiB a minute after warm-up.

    place: a model's folder; not used when `quick`, which takes a tiny model and a few seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        if quick:
            place, weights, seconds = tiny(Path(folder), _TEMPLATE), "bf16", QUICK_S
        questions = _questions(place, weights, QUESTIONS // 3 if quick else QUESTIONS)
        cache = str(TINY_CACHE_MIB if quick else CACHE_MIB)
        words = ["--context", str(CONTEXT), "--cache-mib", cache, "--max-requests", "8"]
        words += ["--kv", "bf16", "--speculate", "lookup"]
        with serving(place, weights, *words) as server:
            return _Soak(server, questions).run(seconds)


def _questions(place: str, weights: Any, count: int) -> list[Question]:
    """With an engine of the same weights, which is gone afterwards."""
    from lezero.serve.llm import LLM

    llm = LLM(place, weights=weights, kv="bf16", context=CONTEXT, cache_bytes=256 << 20)
    return Asker(llm).questions(count)


class _Soak:
    """Threads of clients over one server, and what they found."""

    def __init__(self, server: Served, questions: list[Question]) -> None:
        self.server, self.questions = server, questions
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._end = 0.0

    def run(self, seconds: float) -> dict[str, Any]:
        for question in self.questions[:4]:  # what the first questions make stays
            _whole(self.server, question)
        with self.server.begin({"prompt": "long " * 8192}) as refused:  # a thread for long texts
            refused.recv(1 << 16)
        before = _held(self.server.process.pid)
        self._end = time.monotonic() + seconds
        clients = [threading.Thread(target=self._client, args=(i,)) for i in range(THREADS)]
        clients.append(threading.Thread(target=self._slow_client))
        for thread in clients:
            thread.start()
        memory = list(self._memory())
        for thread in clients:
            thread.join()
        left = self._what_is_left(before)
        return {
            "soak_problems": [text[:_LONG] for text in self.wrong[:_SHOWN]],
            "soak_s": seconds,
            "soak_requests": sum(self.counts.values()),
            **{f"soak_{name}": count for name, count in sorted(self.counts.items())},
            "soak_wrong": len(self.wrong),
            **left,
            "soak_memory_growth": _slope(memory[len(memory) // 3 :]),
            "soak_memory_mib": memory[-1][1],
        }

    def _client(self, number: int) -> None:
        drawn = random.Random(number)
        while time.monotonic() < self._end:
            question = drawn.choice(self.questions)
            kind, act = drawn.choices(self._kinds(drawn, question), weights=(30, 30, 15, 5, 20))[0]
            try:
                problem = act()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            self._count(kind, problem and f"{kind}: {problem}; asked {question.body}")

    def _kinds(
        self, drawn: random.Random, question: Question
    ) -> list[tuple[str, Callable[[], str]]]:
        server = self.server
        return [
            ("whole", lambda: _whole(server, question)),
            ("streams", lambda: _stream(server, question, None)),
            ("left", lambda: _stream(server, question, drawn.randint(0, 10))),
            ("unread", lambda: _leave(server, question, drawn.random() * 0.1)),
            ("poisoned", lambda: poison(server, drawn)),
        ]

    def _count(self, kind: str, problem: str) -> None:
        with self._lock:
            self.counts[kind] += 1
            if problem:
                self.wrong.append(problem)

    def _slow_client(self) -> None:
        """Opens connections and sends them a byte a second; each must be cut off in time."""
        open_since: list[tuple[Any, float]] = []
        while time.monotonic() < self._end:
            if len(open_since) < 4:
                made = self.server.connect()
                made.sendall(b"POST /v1/completions HTTP/1.1\r\nx-slow: ")
                open_since.append((made, time.monotonic()))
            for made, since in list(open_since):
                try:
                    made.sendall(b"x")
                    late = time.monotonic() - since > 40
                except ConnectionError:
                    late = False
                else:
                    if not late:
                        continue
                open_since.remove((made, since))
                made.close()
                self._count("slow", "a slow sender was not cut off in 40 s" if late else "")
            time.sleep(0.5)
        for made, _ in open_since:
            made.close()

    def _memory(self) -> Iterator[tuple[float, float]]:
        """(seconds, resident MiB) of the server, each second until the end."""
        while time.monotonic() < self._end:
            yield time.monotonic(), _resident_mib(self.server.process.pid)
            time.sleep(1.0)

    def _what_is_left(self, before: Counter[str]) -> dict[str, Any]:
        """Blocks and files that the server still holds when nobody asks any more."""
        deadline = time.monotonic() + 30
        while True:
            values = self._metrics()
            busy = values["lezero_requests_running"] + values["lezero_requests_waiting"]
            blocks = int(values["lezero_cache_blocks_used"])
            more = _held(self.server.process.pid) - before
            if not (busy or blocks or more) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if _get(self.server, "/health")[0] != 200:
            self.wrong.append("/health is not well at the end")
        return {
            "soak_leaked_blocks": blocks,
            "soak_leaked_files": more.total(),
            "soak_held_more": [f"{count} {name}" for name, count in sorted(more.items())],
            "soak_preemptions": int(values["lezero_preemptions_total"]),
            "soak_failed_steps": int(values["lezero_failed_steps_total"]),
        }

    def _metrics(self) -> dict[str, float]:
        lines = _get(self.server, "/metrics")[1].decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}


def _whole(server: Served, question: Question) -> str:
    with _asking(server, question, {}) as answer:
        found = json.loads(answer.read())
        if answer.status != 200:
            return f"status {answer.status}: {found}"
    told = Told.nothing(len(question.texts))
    told.whole(found)
    return told.problem(question)


def _stream(server: Served, question: Question, events: int | None) -> str:
    """Reads a stream to its end, or so many events of it."""
    told = Told.nothing(len(question.texts))
    extra = {"stream": True, "stream_options": {"include_usage": True}}
    with _asking(server, question, extra) as answer:
        if answer.status != 200:
            return f"status {answer.status}: {answer.read()!r}"
        for line in answer:
            if line.startswith(b"data: "):
                if events == 0:
                    break
                told.event(line[6:].strip())
                events = None if events is None else events - 1
    return told.problem(question, left=events is not None)


@contextlib.contextmanager
def _asking(
    server: Served, question: Question, extra: dict[str, Any]
) -> Iterator[http.client.HTTPResponse]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, 120)) as made:
        body = json.dumps({**question.body, **extra})
        made.request("POST", question.path, body, {"content-type": "application/json"})
        with made.getresponse() as answer:
            yield answer


def _leave(server: Served, question: Question, seconds: float) -> str:
    """Asks for a whole answer and leaves without it."""
    with server.begin(question.body, question.path):
        time.sleep(seconds)
    return ""


def _get(server: Served, path: str) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, 60)) as made:
        made.request("GET", path)
        with made.getresponse() as answer:
            return answer.status, answer.read()


def _held(pid: int) -> Counter[str]:
    """Open files and threads of a process, by what they are."""
    found: Counter[str] = Counter()
    for kind, name in (("fd", os.readlink), ("task", _thread_name)):
        for entry in Path(f"/proc/{pid}/{kind}").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found[re.sub(r"\d+", "N", name(entry))] += 1
    return found


def _thread_name(task: Path) -> str:
    return f"thread {(task / 'comm').read_text().strip()}"


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _slope(points: list[tuple[float, float]]) -> float:
    """MiB a minute by least squares."""
    if len(points) < 2:
        return 0.0
    middle = sum(t for t, _ in points) / len(points)
    spread = sum((t - middle) ** 2 for t, _ in points)
    return 60 * sum((t - middle) * mib for t, mib in points) / spread
