"""`lz config`: the resolved values of a run config, and its JSON schema for editors."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Show a run config, or its schema for editors.",
)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change one value, as in --set train.lr=3e-4; repeatable."),
]


@app.command()
def show(
    config: Annotated[str, typer.Argument(help="The config file (YAML).")],
    overrides: Overrides = None,
) -> None:
    """Print every value of a run config, defaults included, as YAML.

    Values that the file or --set gave carry the mark "# set"; the others are defaults.
    """
    from lezero.core.config import read_yaml, set_path
    from lezero.train import RunConfig

    given = read_yaml(config)
    for assignment in overrides or []:
        set_path(given, assignment)
    resolved = RunConfig.load(config, list(overrides or []))
    sys.stdout.write(_as_yaml(resolved.to_dict(), given))


@app.command()
def schema() -> None:
    """Print the JSON schema of a run config.

    Editors that speak YAML check and complete a config that starts with the line
    "# yaml-language-server: $schema=lezero.json".
    """
    from lezero.train import RunConfig

    print(json.dumps(RunConfig.schema_dict(), indent=2))


def _as_yaml(values: dict[str, Any], given: Any, indent: int = 0) -> str:
    """YAML of nested `values`, one line a leaf; a leaf whose key is in `given` is marked as set."""
    from lezero.core.config import dump_yaml

    lines: list[str] = []
    for key, value in values.items():
        was_given = isinstance(given, dict) and key in given
        below = given[key] if was_given else None
        if isinstance(value, dict) and value and (isinstance(below, dict) or not was_given):
            lines.append(f"{' ' * indent}{key}:\n" + _as_yaml(value, below, indent + 2))
        else:
            mark = "  # set" if was_given else ""
            lines.append(f"{' ' * indent}{key}: {dump_yaml(value, on_one_line=True)}{mark}\n")
    return "".join(lines)
