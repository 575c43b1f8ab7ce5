"""`lz verify`: the first steps of a run against plain PyTorch."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def verify(
    config: Annotated[str, typer.Argument(help="The run config, a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one value, as in --set train.lr=3e-4; repeatable."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", "-k", min=1, help="Steps to compare.")] = 10,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once", min=0, help="Sequences in one pass of the plain loop; 0: the whole batch."
        ),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a run with plain PyTorch in fp32, step by step, and its resume with itself.

    Ends with status 1 and the step and parameter when they part. Where the run's folder exists,
    verify.json is written into it for the report. For several processes:
    lz launch -n 2 -- lz verify CONFIG
    """
    from lezero.core import groups
    from lezero.jobs.verify import verify as compare
    from lezero.train.config import RunConfig

    resolved = RunConfig.load(config, overrides)
    found = compare(resolved, steps, at_once=at_once)
    if groups.is_main():
        print(json.dumps(found.to_json()) if as_json else found.table(), flush=True)
        found.write(resolved.run)
    found.require()
