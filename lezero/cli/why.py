"""`lz why`: what LeZero decided in a run, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def why(
    run: Annotated[str, typer.Argument(help="The folder of the run.")],
    topic: Annotated[
        str | None, typer.Argument(help="One decision, or the start of its name; all if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Show what LeZero chose by itself in a run: candidates, their figures, and the reason."""
    from lezero.report.decisions import pick, read_decisions

    data = read_decisions(run)
    records = pick(data, topic)
    if as_json:
        print(json.dumps({"format": data["format"], "decisions": records}, indent=2))
        return
    from lezero.report.decisions_table import print_decisions

    print_decisions(records)
