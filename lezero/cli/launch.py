"""`lz launch`: runs a program on several ranks, restarted together when one dies."""

from __future__ import annotations

from typing import Annotated

import typer

# Words after the program belong to the program, also those that look like options of ours.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def launch(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM [ARGS]...",
            help="A script (.py), a module after -m, an installed command, or a program.",
        ),
    ],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Ranks on this machine.")] = 1,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module: python -m.")] = False,
    max_restarts: Annotated[int, typer.Option(help="How often all ranks may start again.")] = 3,
    nnodes: Annotated[str, typer.Option(help="Machines: a number or least:most.")] = "1",
    address: Annotated[str, typer.Option(help="Machine where the launchers meet.")] = "",
    port: Annotated[int, typer.Option(help="Port where they meet; 0 takes a free one.")] = 0,
    join_timeout: Annotated[
        int, typer.Option(help="Seconds that the launchers wait for each other.")
    ] = 600,
    threads: Annotated[int, typer.Option(help="Threads of a rank; 0: cores / ranks.")] = 0,
    grace: Annotated[
        float, typer.Option(help="Seconds to save and end after Ctrl-C or SIGTERM.")
    ] = 30.0,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Allow more ranks than cores.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--show-all", help="Show the stdout of every rank, not only rank 0's.")
    ] = False,
) -> int:
    """Run PROGRAM on several ranks; when one dies, all start again from the last checkpoint.

    Examples:  lz launch -n 2 train.py --steps 100   |   lz launch -n 2 lz train config.yaml
    """
    from lezero.core.flags import flag
    from lezero.elastic import LaunchConfig
    from lezero.elastic import launch as start

    config = LaunchConfig(
        ranks=ranks,
        nodes=nnodes,
        address=address,
        port=port,
        max_restarts=max_restarts,
        grace_s=grace,
        join_timeout_s=join_timeout,
        threads=threads,
        oversubscribe=oversubscribe,
        show_all=show_all,
        debug=flag("LEZERO_DEBUG"),
    )
    return start(config, ["-m", *command] if module else command)
