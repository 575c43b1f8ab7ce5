"""`lz generate`: text from a model, for one prompt or for a file of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lezero.core.errors import ConfigError


def generate(
    model: Annotated[str, typer.Argument(help="A run, a Hugging Face folder or a .gguf file.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue.")] = "",
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", "-n", min=1, help="Most new tokens; 128, or what the context has room for."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = 50,
    top_p: Annotated[float | None, typer.Option(help="Draw from this share of chance.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out what has less than this of the best one's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    input: Annotated[
        Path | None,
        typer.Option(
            help='Answer each line of a JSONL file ("prompt" or "messages"), - for stdin.'
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the answers go, a line each; stdout without it.")
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="auto, fp32, bf16, int8 or int4; auto is fp32 for a prompt to a Llama-like model "
            "on a CPU without --kv and --draft."
        ),
    ] = "auto",
    kv: Annotated[str, typer.Option(help="Keys and values in bf16 or int8, or auto.")] = "auto",
    draft: Annotated[
        str | None, typer.Option(help="A smaller model that guesses next tokens.")
    ] = None,
) -> int:
    """Continue a prompt with a trained model, token by token; or answer a file of prompts.

    The status is 1 where answers of a file are errors; the others are there all the same.
    """
    from lezero.jobs import answer

    if output is None:
        _need_stdout()
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    if input is not None:
        answer.refuse("an input file", prompt=prompt or None)
        most = {} if tokens is None else {"max_tokens": tokens}
        given = {**sampling, **most}
        return int(answer.answer_file(model, input, output, weights, kv, given, draft) > 0)
    answer.refuse("one prompt, which is written to the terminal", output=output)
    for piece in answer.continued(model, prompt, tokens, sampling, weights, kv, draft):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _need_stdout() -> None:
    """`ConfigError` where it was closed before the start, and leads nowhere since (see `main`)."""
    if getattr(sys.stdout, "name", "") == os.devnull:
        raise ConfigError(
            "stdout: is closed, so the answers would be lost; leave it open, or give --input and "
            "--output"
        )
