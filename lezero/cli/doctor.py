"""`lz doctor`: checks this machine and this installation."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure the ceilings again (about 10 s).")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing.")] = False,
) -> int:
    """Show what this machine is and reaches, and what is wrong, with the command that mends it.

    Ends with status 1 when something is broken.
    """
    from lezero.jobs import doctor as job

    return job.doctor(as_json=json, refresh=refresh, quick=quick)
