"""One prompt that is continued, or answers to a file of them (`lz generate`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from lezero.core import device
from lezero.core.errors import ConfigError, FileError, NumericsError
from lezero.core.paths import expand_home
from lezero.hub.foreign import is_foreign
from lezero.jobs.writer import open_writer
from lezero.memory.pool import give_back_free_blocks
from lezero.serve.forecast import compared, resident_bytes
from lezero.serve.generation_config import read_generation
from lezero.serve.llm import LLM
from lezero.serve.offline import answer_lines
from lezero.serve.rehearsal import Paces
from lezero.serve.sampling import SamplingParams

Speculate = Literal["off", "draft"]
STDIN = "/dev/stdin"


def continued(
    model: str,
    prompt: str,
    tokens: int | None,
    sampling: dict[str, Any],
    weights: Any = "auto",
    kv: Any = "auto",
    draft: str | None = None,
) -> Iterator[str]:
    """The prompt, then pieces of its continuation as they come.

    Plain generation in fp32; the engine on an accelerator, where weights, kv or a draft are given,
    and for models that transformers' code runs, or whose folder names a repetition penalty, which
    plain generation lacks (then in fp32 too). tokens: most new ones; without it 128, or what there
    is room for.
    """
    model, draft = expand_home(model), draft and expand_home(draft)
    asked = (weights, kv, draft) != ("auto", "auto", None)
    if not (asked or is_foreign(model)) and device.device().type == "cpu":
        own = read_generation(model)
        if own.repetition_penalty == 1:
            own.tell()
            yield from open_writer(model).write(prompt, tokens, **sampling)
            return
        weights = "fp32"
    if tokens is not None and tokens < 1:
        raise ConfigError(f"tokens: got {tokens}, allowed is 1 or more")
    params = SamplingParams.parse(sampling | ({} if tokens is None else {"max_tokens": tokens}))
    speculate: Speculate = "off" if draft is None else "draft"
    llm = LLM(model, weights=weights, kv=kv, max_requests=1, speculate=speculate, draft=draft)
    pieces = llm.stream(prompt, params)
    yield prompt
    for piece in pieces:
        if piece.error is not None:
            raise NumericsError(piece.error)
        yield piece.text


def refuse(what: str, **given: object) -> None:
    """Raises `ConfigError` for an option that was given and has no meaning."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name}: got {value}, which has no meaning for {what}; leave it out")


def answer_file(
    model: str,
    source: Path,
    target: Path | None,
    weights: Any,
    kv: Any,
    params: dict[str, Any],
    draft: str | None = None,
) -> int:
    """Answers each line of `source` into `target` (the terminal without one), and says how fast;
    - is the standard input, and the terminal. How many answers are errors.

    Raises `FileError` for files that cannot be read or written, `ConfigError` for parameters. What
    is wrong with one line is told in its answer. What `target` held before is there until the model
    is open.
    """
    asked = SamplingParams.parse(params)
    model, draft = expand_home(model), draft and expand_home(draft)
    source = Path(STDIN if str(source) == "-" else expand_home(source))
    target = None if target is None or str(target) == "-" else Path(expand_home(target))
    _check(source, target)
    speculate: Speculate = "off" if draft is None else "draft"
    with _opened(source, target) as (given, found):
        before = resident_bytes()
        llm = LLM(model, weights=weights, kv=kv, speculate=speculate, draft=draft)
        give_back_free_blocks()  # what opening it left is not what answers take
        for line in llm.forecast.lines():
            print(line, file=sys.stderr)
        if target is not None and target.is_file():  # a device or a pipe has nothing to empty
            with _named(target):
                found.truncate(0)
        began, lines, errors, tokens = time.perf_counter(), 0, 0, 0
        for answer in answer_lines(llm, given, asked):
            _write(answer, found, target)
            lines, errors = lines + 1, errors + ("error" in answer)
            tokens += answer.get("tokens", 0)
        took = time.perf_counter() - began
        give_back_free_blocks()  # of vast lines
    print(
        f"{lines} answers ({errors} errors), {tokens} tokens in {took:.1f} s, "
        f"{tokens / took:,.0f} tokens/s",
        file=sys.stderr,
    )
    for line in _compared(llm, before):
        print(line, file=sys.stderr)
    return errors


def _compared(llm: LLM, before: int) -> list[str]:
    """The memory that was taken beside the forecast's, on a CPU. Speeds of many lines at once have
    no counterpart there, whose speeds are those of one request alone."""
    if llm.program.place.type != "cpu":
        return []
    cache_share, draft_share = llm.touched
    return compared(
        llm.forecast,
        Paces(),
        Paces(),
        taken=resident_bytes() - before,
        cache_share=cache_share,
        draft_share=draft_share,
    )


@contextmanager
def _opened(source: Path, target: Path | None) -> Iterator[tuple[Iterator[str], TextIO]]:
    """The lines of `source` and the other file, before a model is loaded in vain. Bytes that are no
    UTF-8 pass as such.

    What `target` holds is still there.
    """
    with _named(source):
        given = source.open(encoding="utf-8-sig", errors="surrogateescape")
    with given:
        if target is None:
            yield _lines(given, source), sys.stdout
            return
        with _named(target):
            found = target.open("a", encoding="utf-8")
        try:
            yield _lines(given, source), found
        except BaseException:
            with suppress(OSError):  # it would try again to write what it could not
                found.close()
            raise
        with _named(target):
            found.close()


def _lines(given: TextIO, source: Path) -> Iterator[str]:
    with _named(source):
        yield from given


def _write(answer: dict[str, Any], found: TextIO, target: Path | None) -> None:
    line = json.dumps(answer, ensure_ascii=False)
    try:
        line.encode(found.encoding or "utf-8")
    except UnicodeEncodeError:  # a terminal without these letters, or half of one: all in escapes
        line = json.dumps(answer)
    with _named(target or "stdout"):
        found.write(line + "\n")
        found.flush()


@contextmanager
def _named(file: Path | str) -> Iterator[None]:
    """Turns what the system says against `file` into a `FileError`."""
    try:
        yield
    except BrokenPipeError:  # whoever read it has left, and needs no message
        raise
    except OSError as error:
        raise FileError(f"{file}: {error.strerror}") from None


def _check(source: Path, target: Path | None) -> None:
    if not source.exists():
        raise FileError(f"{source}: no such file")
    if source.is_file() and target is not None and target.exists() and target.samefile(source):
        raise FileError(f"{target}: is the file of prompts; name another one for the answers")
