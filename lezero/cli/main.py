"""`lz`: finds the command, runs it, and turns every failure into one message and an exit status.

Commands are known from the table `COMMANDS` alone; the module of a command is imported when that
command is run, so `lz --help` never waits for torch. A command module holds a function that typer
understands, named as the command (or a `typer.Typer` called `app` for one with subcommands), and
optionally `CONTEXT_SETTINGS`, typer's settings for that command. `lz doctor` also runs where typer,
or what typer stands on, does not import: its plain flags are read here (`Entry.flags`).

Exit statuses: 0 done, 1 a failure that the message explains, 2 wrong usage or config,
70 a bug in LeZero, 130 interrupted, 141 the reader of our output went away. A `LeZeroError`
brings its own.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import importlib
import inspect
import itertools
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lezero.core.errors import LeZeroError
from lezero.core.flags import FLAGS, flag
from lezero.core.log import say

BUG, INTERRUPTED, READER_GONE = 70, 130, 141
DEBUG = "LEZERO_DEBUG"
PLAIN = {"±": "+/-", "×": "x", "·": "-", "…": "...", "µ": "u", "∞": "inf"}
"""What is written for characters of our own where stdout cannot say them."""


@dataclass(frozen=True)
class Entry:
    """Where a command lives (`module:attribute`) and the line that `lz --help` shows for it.

    bare: a function that does the same without typer; it is called when all words are `flags`
    (word → keyword that becomes True).
    """

    target: str
    help: str
    bare: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


COMMANDS: dict[str, Entry] = {
    "demo": Entry("lezero.cli.demo:demo", "Forecast, train, survive a kill, generate, report."),
    "doctor": Entry(
        "lezero.cli.doctor:doctor",
        "Check this machine and installation.",
        bare="lezero.jobs.doctor:doctor",
        flags={"--json": "as_json", "--refresh": "refresh", "--quick": "quick"},
    ),
    "plan": Entry("lezero.cli.plan:plan", "Forecast the memory and time of a run."),
    "train": Entry("lezero.cli.train:train", "Train a model from a config file."),
    "launch": Entry("lezero.cli.launch:launch", "Train on several processes, resumed if one dies."),
    "dist-test": Entry("lezero.cli.dist_test:dist_test", "Check and time the wires between ranks."),
    "verify": Entry("lezero.cli.verify:verify", "Compare a run with plain PyTorch, step by step."),
    "generate": Entry("lezero.cli.generate:generate", "Write text with a trained model."),
    "serve": Entry("lezero.cli.serve:serve", "Serve a model over HTTP, as OpenAI's API does."),
    "compress": Entry("lezero.cli.compress:compress", "Quantize a model, measured, into a folder."),
    "report": Entry("lezero.cli.report:report", "Write the report page of a run."),
    "why": Entry("lezero.cli.why:why", "Show what LeZero decided in a run, and why."),
    "config": Entry("lezero.cli.config:app", "Show a run config, or its schema for editors."),
}


def load(name: str) -> Any:
    """Imports one command and returns typer's object for it, ready to be called."""
    import typer

    entry = COMMANDS[name]
    module = importlib.import_module(entry.module)
    target = getattr(module, entry.target.partition(":")[2])
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        app.command(name, context_settings=settings, help=_unwrapped(target.__doc__))(target)
        target = app
    command = typer.main.get_command(target)
    command.context_settings.setdefault("help_option_names", ["--help", "-h"])
    return command


def _unwrapped(text: str | None) -> str:
    """A docstring whose lines end where the terminal's do."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    debug, arguments = _take_debug(arguments)
    with _debug_flag(debug):
        try:
            status = _run(arguments)
            sys.stdout.flush()
        except BaseException as error:
            status = _explain(error, arguments)
    return status


def _prepare_streams() -> None:
    """A command never fails for where its words go.

    A stream that was closed before the start leads nowhere from now on: its number would go to the
    next file that is opened. A line is written when it is told, also to a pipe or a file, whose
    reader may wait for it. Characters that stdout's encoding lacks are written as plain ones that
    mean the same, or as "?".
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    with contextlib.suppress(AttributeError, ValueError, OSError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    encoding, errors = getattr(sys.stdout, "encoding", "utf-8"), getattr(sys.stdout, "errors", "")
    if errors == "strict" or not encoding.lower().startswith("utf"):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            codecs.register_error("lezero-plain", _in_plain_characters)
            sys.stdout.reconfigure(errors="lezero-plain")  # type: ignore[union-attr]


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(PLAIN.get(character, "?") for character in lacking), error.end


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_help())
        return 0
    name, *rest = arguments
    if name in ("--version", "-V"):
        from lezero import __version__

        print(f"lezero {__version__}")
        return 0
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(COMMANDS)}"
        say(f"error: there is no {what} '{name}'; {hint}")
        return 2
    entry = COMMANDS[name]
    if entry.bare and set(rest) <= entry.flags.keys():
        module, _, attribute = entry.bare.partition(":")
        call = getattr(importlib.import_module(module), attribute)
        return int(call(**{entry.flags[word]: True for word in rest}))
    if name != "doctor":  # which tells of them all
        for variable in FLAGS:
            flag(variable)
    command = load(name)
    command.invoke = _told_of_ctrl_c(command.invoke)
    result = command.main(args=rest, prog_name=f"lz {name}", standalone_mode=False)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


class _Interrupted(BaseException):
    """Ctrl-C, of which typer would make a status without a word."""


def _told_of_ctrl_c(invoke: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(context: Any) -> Any:
        try:
            return invoke(context)
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    return run


def _help() -> str:
    lines = [
        "Usage: lz [--debug] COMMAND ...",
        "",
        "Train PyTorch models with zero surprise: forecast, proven, never slower.",
        "",
        "Commands (lz COMMAND --help tells more):",
    ]
    lines += [f"  {name:<10} {entry.help}" for name, entry in COMMANDS.items()]
    lines += [
        "",
        "Options:",
        "  --debug    Show the traceback of an error (LEZERO_DEBUG=1 does the same).",
        "  --version  Show the version.",
        "  --help     Show this text.",
    ]
    return "\n".join(map(_wrapped, lines))


def _wrapped(line: str) -> str:
    """As wide as the terminal; what an entry says goes on below itself."""
    width, indent = max(30, shutil.get_terminal_size().columns), 13 if line[:1] == " " else 0
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _explain(error: BaseException, arguments: Sequence[str] = ()) -> int:
    """Writes one message about `error` to stderr and returns the exit status that belongs to it.

    arguments: the words of the command line, for the value of an option that is refused."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        error = error.__context__  # of which typer makes a status of 1
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, BrokenPipeError):
        _drop_stdout()
        return READER_GONE
    debug = _debugging()
    if debug:
        traceback.print_exception(error)
    pressed = isinstance(error, KeyboardInterrupt | _Interrupted)
    if pressed or type(error).__name__ == "Abort":
        say("interrupted")
        return INTERRUPTED
    if isinstance(error, LeZeroError):
        sys.last_value = error  # a launcher reads it: trying again cannot help
        say(f"error: {error}")
        return error.exit_status
    if hasattr(error, "format_message"):
        said = _bad_value(error, arguments) or error.format_message().rstrip(".")
        say(f"error: {said}{_usage_hint(error)}")
        return int(getattr(error, "exit_code", 2))
    if isinstance(error, ImportError) and not str(error.name or "").startswith("lezero"):
        say(f"error: a package that LeZero needs does not import ({_first_line(error)})")
        say("`lz doctor` names it and the command that mends it")
        return 1
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        say(f"error: {where}{error.strerror or error}")
        return 1
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        say(f"error: out of memory ({_first_line(error)}); `lz plan` tells what would fit")
        return 1
    say(f"error: a bug in LeZero: {type(error).__name__}: {_first_line(error)}")
    if not debug:
        say("please report it with its traceback, which the same command shows with --debug")
    return BUG


def _debugging() -> bool:
    with contextlib.suppress(LeZeroError):  # a value that is not allowed is what is explained
        return bool(flag(DEBUG))
    return False


def _bad_value(error: Any, arguments: Sequence[str]) -> str:
    """The option that typer refuses the value of, with the value and what is allowed; nothing for
    other errors."""
    names = [*getattr(getattr(error, "param", None), "opts", ())]
    _, found, allowed = str(getattr(error, "message", "")).partition("Input should be ")
    refused = getattr(error.__cause__, "errors", None)  # of pydantic's, which knows the value
    if not found or refused is None:
        return ""
    value = str(refused()[0]["input"])
    pairs = [*itertools.zip_longest(arguments, arguments[1:], fillvalue="")]
    for word, following in reversed(pairs):  # the last one counts
        for option in names:
            joined = f"{option}={value}" if option.startswith("--") else f"{option}{value}"
            if word == joined or (word, following) == (option, value):
                return f"{option}: got {value!r}, allowed is {allowed.partition(',')[0]}"
    return ""


def _usage_hint(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f" (see {context.command_path} --help)" if context is not None else ""


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _drop_stdout() -> None:
    """Leaves nothing in the buffer that the interpreter would try to write when it exits."""
    with contextlib.suppress(OSError, ValueError):
        stdout = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)


def _take_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """Takes `--debug` out of a command line, wherever it stands.

    What follows `--` stays as it is. After `lz launch` only the next word is looked at: those
    behind it may belong to the program that is launched.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "launch" in arguments[:2]:
        end = min(end, arguments.index("launch") + 2)
    ours = [word for word in arguments[:end] if word != "--debug"]
    return len(ours) < end, ours + arguments[end:]


@contextlib.contextmanager
def _debug_flag(debug: bool) -> Iterator[None]:
    """Sets the flag for this command and the processes it starts."""
    before = os.environ.get(DEBUG)
    if debug:
        os.environ[DEBUG] = "1"
    try:
        yield
    finally:
        if debug and before is None:
            os.environ.pop(DEBUG, None)
        elif debug and before is not None:
            os.environ[DEBUG] = before
