"""`lz demo`: what LeZero is for, in one command."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    folder: Annotated[str | None, typer.Option("--run", help="Folder of the demo's run.")] = None,
) -> int:
    """Forecast, train, survive a kill, generate, serve, report; under five minutes on two cores."""
    from lezero.jobs.demo import demo as run

    return run(folder)
