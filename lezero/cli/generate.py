"""`lz generate`: text from a trained model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def generate(
    model: Annotated[str, typer.Argument(help="A run, a Hugging Face folder or a .gguf file.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue.")] = "",
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", "-n", help="Most new tokens; 128, or what the context has room for."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = 50,
    top_p: Annotated[float | None, typer.Option(help="Draw from this share of chance.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Continue a prompt with a trained model, token by token."""
    from lezero.train.writer import open_writer

    writer = open_writer(model)
    for piece in writer.write(
        prompt, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
