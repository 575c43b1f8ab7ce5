"""Writes docs/cli.md from the commands themselves. `make docs` runs it; a test compares the two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lezero.cli.main import COMMANDS, load

HEAD = """# Command line

`lz` and `lezero` are the same program, as is `python -m lezero`. Every command takes `--debug`,
which shows the traceback of an error. This page is generated from the code by
`docs/generate_cli.py`.
"""


def page() -> str:
    """The whole page, in Markdown."""
    rows = "".join(
        f"| [`lz {name}`](#lz-{name}) | {entry.help} |\n" for name, entry in COMMANDS.items()
    )
    parts = [HEAD, "| command | what it does |\n|---|---|\n" + rows]
    for name in COMMANDS:
        parts += _sections(load(name), f"lz {name}", 2)
    return "\n".join(parts)


def _sections(command: Any, path: str, level: int) -> list[str]:
    """A section for a command, then one for each of its subcommands."""
    subcommands = getattr(command, "commands", {})
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    usage = [path, *(["COMMAND"] if subcommands else []), *(["[OPTIONS]"] if options else [])]
    usage += [_argument_name(p) for p in arguments]
    lines = [f"{'#' * level} {path}\n", _text(command.help)]
    lines.append(f"```text\n{' '.join(usage)}\n```\n")
    if shown:
        rows = [_row(p, _argument_name(p)) for p in arguments]
        rows += [_row(p, ", ".join([*p.opts, *p.secondary_opts])) for p in options]
        lines.append("| | meaning | default |\n|---|---|---|\n" + "".join(rows))
    for name, below in subcommands.items():
        lines += _sections(below, f"{path} {name}", level + 1)
    return lines


def _argument_name(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name.strip('[]')}]"


def _row(parameter: Any, name: str) -> str:
    meaning = (parameter.help or "").replace("|", "\\|").replace("\n", " ")
    return f"| `{name}` | {meaning} | {_default(parameter)} |\n"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or value == "" or callable(value) or value in ([], ()):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _text(help_text: str | None) -> str:
    paragraphs = (help_text or "").replace("\b", "").strip().split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs) + "\n"


if __name__ == "__main__":
    target = Path(__file__).parent / "cli.md"
    target.write_text(page(), encoding="utf-8")
    print(f"wrote {target}", file=sys.stderr)
