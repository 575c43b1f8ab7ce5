"""`lz dist-test`: are the wires between ranks right, how fast are they, would a codec pay?"""

from __future__ import annotations

from typing import Annotated

import typer


def dist_test(
    ranks: Annotated[int, typer.Option("--np", "-n", min=1, help="Ranks on this machine.")] = 2,
    model: Annotated[
        str,
        typer.Option(help="A preset or a number of parameters (350m): what codec auto would do."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    port: Annotated[int, typer.Option(help="Port where the ranks meet; 0 takes a free one.")] = 0,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Allow more ranks than cores.")
    ] = False,
) -> int:
    """Check every collective between ranks and measure it, predicted against measured.

    Each result is held against a sum made by one process. Ends with status 1 when one is wrong.
    For several machines: lz launch -n 2 --nnodes 2 --address HOST --port 29500 lz dist-test
    """
    from lezero.jobs import dist_test as job

    return job.dist_test(ranks, model, as_json=as_json, port=port, oversubscribe=oversubscribe)


def main() -> int:
    """`lz-dist-test`: the same command by its own name."""
    import sys

    from lezero.cli.main import main as lz

    return lz(["dist-test", *sys.argv[1:]])
