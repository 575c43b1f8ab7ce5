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
        int, typer.Option("--ranks", "-n", min=1, help="Ranks that will share the batch.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Forecast the memory and time of a run before anything of it is allocated.

    Ends with status 1 and what would fit when the run does not fit this machine.
    """
    from lezero.plan import forecast
    from lezero.plan.table import render
    from lezero.profiler import hardware
    from lezero.train.config import RunConfig
    from lezero.train.recipe import plan_inputs

    build, spec = plan_inputs(RunConfig.load(config, set_), world=ranks)
    made = forecast(build, spec, hardware())
    print(jsonlib.dumps(made.to_dict()) if json else render(made), flush=True)
    made.require_fit()
