"""Answers to a file of prompts (`lz generate MODEL --input FILE`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from lezero.core.errors import FileError
from lezero.serve.llm import LLM
from lezero.serve.offline import answer_lines
from lezero.serve.sampling import SamplingParams


def answer_file(
    model: str,
    source: Path,
    target: Path | None,
    weights: Any,
    kv: Any,
    params: dict[str, Any],
    draft: str | None = None,
) -> None:
    """Answers each line of `source` into `target` (the terminal without one), and says how fast.

    Raises `FileError` for files that cannot be read or written, `ConfigError` for parameters. What
    is wrong with one line is told in its answer.
    """
    asked = SamplingParams.parse(params)
    _check(source, target)
    speculate: Literal["off", "draft"] = "off" if draft is None else "draft"
    with _opened(source, target) as (given, found):
        llm = LLM(model, weights=weights, kv=kv, speculate=speculate, draft=draft)
        forecast = llm.forecast
        for line in forecast.lines():
            print(line, file=sys.stderr)
        began, lines, errors, tokens = time.perf_counter(), 0, 0, 0
        for answer in answer_lines(llm, given, asked):
            found.write(json.dumps(answer, ensure_ascii=False) + "\n")
            found.flush()
            lines, errors = lines + 1, errors + ("error" in answer)
            tokens += answer.get("tokens", 0)
        took = time.perf_counter() - began
    print(
        f"{lines} answers ({errors} errors), {tokens} tokens in {took:.1f} s, "
        f"{tokens / took:,.0f} tokens/s",
        file=sys.stderr,
    )


@contextmanager
def _opened(source: Path, target: Path | None) -> Iterator[tuple[TextIO, TextIO]]:
    """Both files, before a model is loaded in vain. Bytes that are no UTF-8 pass as such."""
    try:
        with source.open(encoding="utf-8-sig", errors="surrogateescape") as given:
            if target is None:
                yield given, sys.stdout
                return
            with target.open("w", encoding="utf-8") as found:
                yield given, found
    except OSError as error:
        raise FileError(f"{error.filename or source}: {error.strerror}") from None


def _check(source: Path, target: Path | None) -> None:
    if not source.is_file():
        raise FileError(f"{source}: no such file")
    if target is not None and target.resolve() == source.resolve():
        raise FileError(f"{target}: is the file of prompts; name another one for the answers")
