"""`lz` itself: it lists what is there, and every failure is one message and a status."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lezero.cli import main as cli
from lezero.cli.main import COMMANDS, Entry, main

FAILING = '''
import errno
import os
from typing import Annotated
import typer
from lezero.core.errors import CapacityError, ConfigError

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

def fail(
    how: Annotated[str, typer.Argument(help="How to fail.")],
    number: Annotated[int, typer.Option("--number", help="A number.")] = 1,
) -> int | None:
    """Fail in one way or another."""
    if how == "config":
        raise ConfigError("train.lr: got 'x', allowed is a number")
    if how == "capacity":
        raise CapacityError("needs 9 GiB, 4 GiB are there")
    if how == "bug":
        raise ZeroDivisionError("division by zero")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "exit":
        raise typer.Exit(7)
    if how == "system-exit":
        raise SystemExit("text")
    if how == "missing":
        open("/no/such/file")
    if how == "memory":
        raise MemoryError("could not allocate")
    if how == "pipe":
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    if how == "status":
        return number
    if how == "words":
        print("\\u00b1\\u4e16 \\udcff")
    print("LEZERO_DEBUG", os.environ.get("LEZERO_DEBUG"))
'''


@pytest.fixture(autouse=True)
def fail_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adds a command `fail` to the table for one test."""
    (tmp_path / "lz_failing_command.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("LEZERO_DEBUG", raising=False)
    monkeypatch.setitem(COMMANDS, "fail", Entry("lz_failing_command:fail", "Fail."))
    yield
    sys.modules.pop("lz_failing_command", None)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("config", 2, "error: train.lr: got 'x', allowed is a number\n"),
        ("capacity", 1, "error: needs 9 GiB, 4 GiB are there\n"),
        ("missing", 1, "error: /no/such/file: No such file or directory\n"),
        ("interrupt", 130, "interrupted\n"),
        ("system-exit", 1, ""),
        ("exit", 7, ""),
    ],
)
def test_a_failure_is_one_message_and_a_status(
    how: str, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fail", how]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err == text


def test_a_bug_says_so_and_how_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail", "bug"]) == 70
    err = capsys.readouterr().err
    assert err.startswith("error: a bug in LeZero: ZeroDivisionError: division by zero\n")
    assert "--debug" in err
    assert "Traceback" not in err


def test_memory_running_out_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail", "memory"]) == 1
    assert "error: out of memory (could not allocate)" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["--debug", "fail", "bug"], ["fail", "bug", "--debug"]])
def test_debug_shows_the_traceback(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "in fail" in err
    assert "LEZERO_DEBUG" not in os.environ


def test_the_flag_in_the_environment_does_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEZERO_DEBUG", "1")
    assert main(["fail", "config"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: train.lr: got 'x', allowed is a number\n")


def test_a_variable_with_a_wrong_value_is_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LEZERO_DEBUG", "2"), ("LEZERO_LOG", "loud"), ("LEZERO_POOL", "maybe")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert main(["fail", "words"]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"error: {name}='{value}': allowed is ")
            assert said.count("\n") == 1


def test_debug_reaches_processes_that_a_command_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fail", "nothing", "--debug"]) == 0
    assert "LEZERO_DEBUG 1" in capsys.readouterr().out


def test_a_package_that_does_not_import_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["plan", "run.yaml"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: a package that LeZero needs does not import (import of typer ")
    assert "`lz doctor`" in err


def test_debug_of_another_program_stays_with_it() -> None:
    line = ["launch", "-n", "2", "-m", "a", "--debug"]
    assert cli._take_debug(line) == (False, line)
    assert cli._take_debug(["--debug", *line]) == (True, line)
    assert cli._take_debug(["launch", "--debug", "a.py"]) == (True, ["launch", "a.py"])
    assert cli._take_debug(["fail", "--", "--debug"]) == (False, ["fail", "--", "--debug"])


def test_a_command_may_return_its_status() -> None:
    assert main(["fail", "status", "--number", "3"]) == 3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["fial"], "error: there is no command 'fial'; did you mean 'fail'?"),
        (["--nope"], "error: there is no option '--nope'"),
        (["fail"], "error: Missing argument"),
        (["fail", "status", "--number", "x"], "--number"),
        (["config"], "error: Missing command (see lz config --help)"),
    ],
)
def test_wrong_usage_is_status_2(
    line: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "x", "-n", "0"], "-n: got '0', allowed is greater than or equal to 1"),
        (["plan", "x", "--ranks=0"], "--ranks: got '0', allowed is greater than or equal to 1"),
        (["plan", "x", "-n0"], "-n: got '0', allowed is greater than or equal to 1"),
        (["plan", "-n", "x", "x"], "-n: got 'x', allowed is a valid integer"),
        (["generate", "x", "-n", "0", "-p", "x"], "-n: got '0', allowed is greater than"),
        (["generate", "x", "-n", "5", "-n", "0"], "-n: got '0', allowed is greater than"),
        (["generate", "x", "-n", "5", "--tokens=0"], "--tokens: got '0', allowed is greater"),
        (["generate", "x", "-n", "0", "-p", "-n5"], "-n: got '0', allowed is greater than"),
        (["generate", "x", "-n=3"], "-n: got '=3', allowed is a valid integer"),
    ],
)
def test_a_value_that_is_refused_is_told_with_its_option_and_what_is_allowed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.endswith(f"(see lz {words[0]} --help)\n")


def test_help_names_every_command_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ([], ["--help"], ["-h"]):
        assert main(line) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out for name in COMMANDS)
        assert "--debug" in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_loads_and_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for way in ("--help", "-h"):
        assert main([name, way]) == 0
        assert "Usage: " in capsys.readouterr().out
    assert cli.load(name).help


def test_version_and_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    ours = capsys.readouterr().out
    assert ours.startswith("lezero 0.")
    folder = Path(sys.executable).parent
    for command in ([folder / "lz"], [folder / "lezero"], [sys.executable, "-m", "lezero"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == ours


def test_help_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["--help"]) == 0
        texts.append(capsys.readouterr().out)
    assert max(map(len, texts[0].splitlines())) <= 40
    assert texts[0].split() == texts[1].split()


@pytest.mark.parametrize("arguments", [["--help"], ["report", "."]])
def test_help_and_a_report_are_quick_and_load_no_torch(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    code = (
        f"import sys; from lezero.cli.main import main; assert main({arguments}) == 0; "
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    print(f"lz {arguments[0]}: {time.perf_counter() - began:.2f} s")


def test_a_reader_that_goes_away_is_quiet() -> None:
    code = "import sys; from lezero.cli.main import main; sys.exit(main(['--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_a_command_whose_reader_goes_away_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail", "pipe"]) == 141
    assert capsys.readouterr().err == ""


def failing_process(how: str, folder: Path, redirect: str = "", **environ: str) -> Any:
    code = (
        "import sys; from lezero.cli.main import COMMANDS, Entry, main; "
        "COMMANDS['fail'] = Entry('lz_failing_command:fail', ''); sys.exit(main(sys.argv[1:]))"
    )
    line = f'exec "$0" -c "$1" fail {how} {redirect}'
    return subprocess.run(
        ["sh", "-c", line, sys.executable, code],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{Path(cli.__file__).parents[2]}", **environ},
    )


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("ascii", b"+/-? ?"), ("latin-1", b"\xb1? ?"), ("utf-8", b"\xc2\xb1\xe4\xb8\x96 ?")],
)
def test_characters_that_the_output_cannot_hold_do_not_end_a_command(
    tmp_path: Path, encoding: str, written: bytes
) -> None:
    done = failing_process("words", tmp_path, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.splitlines()[0] == written


def test_a_stream_that_was_closed_does_not_end_a_command(tmp_path: Path) -> None:
    for redirect in (">&-", ">&- 2>&-", "<&- >&- 2>&-"):
        done = failing_process("words", tmp_path, redirect)
        assert (done.returncode, done.stderr) == (0, b"")
        assert failing_process("config", tmp_path, redirect).returncode == 2


def test_answers_do_not_go_to_a_stream_that_was_closed(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m lezero generate {tmp_path} -p hi >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    assert "stdout: is closed" in done.stderr


def test_help_is_wrapped_once(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("Ends with status 1"))
    assert all(len(line) > 60 for line in lines[at : at + 2])


def test_doctor_cannot_both_measure_and_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--refresh"]) == 2
    assert "leave one out" in capsys.readouterr().err
