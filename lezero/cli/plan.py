"""`lz plan`: the forecast of a run."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer


def plan(
    config: Annotated[str, typer.Argument(help="The run config, a YAML file.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a value: train.batch=16.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            "-n",
            min=1,
            help="Ranks that will share the batch; WORLD_SIZE where that is set, or else 1.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Forecast the memory and time of a run before anything of it is allocated.

    Ends with status 1 and what would fit when the run does not fit this machine. Where files of its
    data are not there, the forecast assumes text for at least one row and the status is 1, too.
    Under `lz launch`, which sets WORLD_SIZE, rank 0 alone makes the forecast, for all ranks.
    """
    from lezero.core.errors import FileError
    from lezero.core.launched import number
    from lezero.data.build import missing_files
    from lezero.plan import forecast
    from lezero.plan.table import render
    from lezero.profiler import hardware
    from lezero.train.config import RunConfig
    from lezero.train.recipe import plan_inputs

    started = max(1, number("WORLD_SIZE", 1))
    if started > 1 and number("RANK"):  # rank 0 tells it for all, and times alone what it forecasts
        return
    asked = RunConfig.load(config, set_)
    missing = missing_files(asked.data)
    build, spec = plan_inputs(asked, world=ranks or started)
    made = forecast(build, spec, hardware())
    assumed = f"text for at least one row of {asked.data.sequence:,} tokens" if missing else None
    if json:
        more = {"missing_files": missing, "assumed": assumed}
        print(jsonlib.dumps(made.to_dict() | more), flush=True)
    else:
        lines = ["", *(f"Not found: {what}" for what in missing), f"Assumed instead: {assumed}"]
        print("\n".join([render(made), *(lines if missing else ())]), flush=True)
    made.require_fit()
    if missing:
        raise FileError(f"{'; '.join(missing)}. `lz train` ends here until they are there")
