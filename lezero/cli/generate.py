"""`lz generate`: text from a model, for one prompt or for a file of them."""

from __future__ import annotations

import sys
from pathlib import Path
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
    input: Annotated[
        Path | None,
        typer.Option(help='Answer each line of a JSONL file ("prompt" or "messages").'),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the answers go, a line each; - without it.")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="With --input: auto, fp32, bf16, int8 or int4.")
    ] = "auto",
    kv: Annotated[
        str, typer.Option(help="With --input: keys and values in bf16 or int8, or auto.")
    ] = "auto",
    draft: Annotated[
        str | None, typer.Option(help="With --input: a smaller model that guesses next tokens.")
    ] = None,
) -> None:
    """Continue a prompt with a trained model, token by token; or answer a file of prompts."""
    if input is not None:
        from lezero.jobs.answer import answer_file

        params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        most = {} if tokens is None else {"max_tokens": tokens}
        answer_file(model, input, output, weights, kv, {**params, **most}, draft)
        return
    _refuse_without_input(output=output, weights=weights, kv=kv, draft=draft)
    from lezero.train.writer import open_writer

    writer = open_writer(model)
    for piece in writer.write(
        prompt, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _refuse_without_input(**given: object) -> None:
    from lezero.core.errors import ConfigError

    for name, value in given.items():
        if value not in (None, "auto"):
            raise ConfigError(
                f"{name}: got {value}, which is for --input; one prompt is continued in fp32 "
                "without the engine, so leave it out, or give a file of one line"
            )
