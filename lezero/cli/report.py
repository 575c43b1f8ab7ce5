"""`lz report`: the report page of a run."""

from __future__ import annotations

from typing import Annotated

import typer


def report(run: Annotated[str, typer.Argument(help="The folder of the run.")]) -> None:
    """Write RUN/report.html from what the run recorded, and name it.

    The page holds everything it needs and opens offline. It can be written while the run goes on.
    """
    from lezero.train.run_report import write_report

    print(write_report(run))
