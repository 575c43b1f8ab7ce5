"""`lz train`: a run from a config file."""

from __future__ import annotations

from typing import Annotated

import typer


def train(
    config: Annotated[str, typer.Argument(help="The config file (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one value, as in --set train.lr=3e-4; repeatable."),
    ] = None,
) -> int:
    """Forecast, train, checkpoint and report a run. Started again, it goes on where it was.

    Ctrl-C and SIGTERM save a last generation first. For several processes:
    lz launch -n 2 -- lz train CONFIG
    """
    from lezero.train import RunConfig, Trainer

    return Trainer(RunConfig.load(config, overrides)).run().exit_status
