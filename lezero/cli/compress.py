"""`lz compress`: a smaller model from a config file."""

from __future__ import annotations

from typing import Annotated

import typer


def compress(
    config: Annotated[str, typer.Argument(help="The config file (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one value, as in --set scheme.group=32; repeatable."),
    ] = None,
) -> None:
    """Quantize a model: folder in, folder out, with size, perplexity and speed before and after.

    The model is a causal language model: a Hugging Face folder, a run of the trainer or a .gguf
    file; lz.quantize_ takes any other module. Layers that are not faster on this machine's
    processor stay as they were, unless the config says objective: size; for a GPU, give
    lz.quantize_ the model there.
    """
    from lezero.jobs.compress import compress as run
    from lezero.jobs.compress_config import CompressConfig

    print(run(CompressConfig.load(config, overrides)), flush=True)
