"""Blanks at the ends of lines are dropped, and nothing else is."""

import contextlib
import io

import pytest
from rich.console import Console
from rich.text import Text

from lezero.report.decisions_table import print_decisions
from lezero.report.terminal import unpadded

NONE = "no decisions are recorded here: nothing was measured to choose from\n"


def test_lines_end_without_blanks_and_only_at_line_feeds():
    out = io.StringIO()
    console = Console(file=out, width=40)
    with unpadded(console):
        console.print(Text("a\u2028b \u2028\x85c  "), end="  \n")
        console.print("d ", end="")
        console.print("e")
    console.print("f ")
    assert out.getvalue() == "a\u2028b \u2028\x85c\nd e\nf \n"


def test_what_is_recorded_or_captured_is_there():
    console = Console(file=io.StringIO(), record=True)
    print_decisions([], console)
    assert console.export_text() == NONE
    with console.capture() as captured:
        console.print("before")
        print_decisions([], console)
    assert captured.get() == "before\n" + NONE


def test_what_was_printed_before_an_error_stays():
    out = io.StringIO()
    console = Console(file=out)

    def fails():
        with unpadded(console):
            console.print("first  ")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert out.getvalue() == "first\n"


def test_a_console_follows_stdout_afterwards():
    console = Console()
    with unpadded(console):
        pass
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_decisions([], console)
    assert out.getvalue() == NONE
