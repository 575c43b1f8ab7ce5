"""`lz serve`: a model behind OpenAI's HTTP protocol."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from lezero.core.errors import ConfigError

_OTHERS = {"drain_s": "drain", "body_bytes": "body_kib", "allow_hosts": "allow_host"}
"""Fields that are called otherwise than their options."""


@contextmanager
def _flags_named() -> Iterator[None]:
    """Errors call fields as the flags that the user gave; those of a file keep their names."""
    try:
        yield
    except ConfigError as error:
        words = inspect.signature(serve).parameters.keys()

        def flag(found: re.Match[str]) -> str:
            name = _OTHERS.get(found[1], found[1])
            known = name in words and name != "model"
            return f"--{name.replace('_', '-')}" if known else found[0]

        said = str(error)
        first = re.match(r"(\w+)(?:\.\d+)?: ", said)
        if first and _OTHERS.get(first[1], first[1]) in words:
            said = re.sub(r"(?:^|(?<=; ))(\w+)(?:\.\d+)?(?=: )", flag, said)
        raise ConfigError(said, error.problems) from error


@_flags_named()
def serve(
    model: Annotated[
        str,
        typer.Argument(help="A run, a Hugging Face folder or a .gguf file.", show_default=False),
    ] = "",
    module: Annotated[
        str,
        typer.Option(help="Instead: PACKAGE.MODULE:FUNCTION, which gives (module, example)."),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that a proxy on this machine passes on; repeatable."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[str, typer.Option(help="The model's name for clients.")] = "",
    weights: Annotated[
        str, typer.Option(help="auto, bf16, int8, int4, or fp32 (slow, exact).")
    ] = "auto",
    kv: Annotated[
        str, typer.Option(help="Keys and values: bf16, int8, or auto (bf16 where it fits).")
    ] = "auto",
    context: Annotated[
        int | None, typer.Option(help="Tokens of a request at most; the model's by default.")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(help="Requests at once; else 32.")] = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait besides.")] = 64,
    cache_mib: Annotated[
        int | None, typer.Option(help="Memory for keys and values, in MiB.")
    ] = None,
    speculate: Annotated[
        str, typer.Option(help="Guess next tokens: off, lookup, or draft.")
    ] = "off",
    draft: Annotated[
        str | None, typer.Option(help="With --speculate draft: the smaller model that guesses.")
    ] = None,
    p99_ms: Annotated[
        float | None,
        typer.Option(help="Encoders and modules: answer 99% within so many ms; else 50."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Encoders and modules: batch at most; else found.")
    ] = None,
    delay_ms: Annotated[
        float | None, typer.Option(help="Encoders and modules: wait for others; else found.")
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            help="Folder for what is chosen (lz why); one in the cache folder by default."
        ),
    ] = None,
    body_kib: Annotated[int, typer.Option(min=1, help="KiB of a request's body at most.")] = 1024,
    keys: Annotated[
        str | None, typer.Option(help="File of API keys, hashed; LEZERO_API_KEYS adds to it.")
    ] = None,
    rate: Annotated[int | None, typer.Option(help="Requests a minute by keys of one name.")] = None,
    drain: Annotated[
        float, typer.Option(help="Seconds that running answers have after SIGTERM.")
    ] = 30.0,
    public_without_keys: Annotated[
        bool, typer.Option("--public-without-keys", help="Let anyone on the network ask.")
    ] = False,
    new_key: Annotated[
        str | None,
        typer.Option(help="Print a new API key of this name and its line; serve nothing."),
    ] = None,
) -> int:
    """Serve a model: OpenAI's protocol at /v1, a page at /, /health, /ready, /metrics.

    A sentence encoder answers /v1/embeddings, the module of --module /v1/infer; requests share
    steps, whose size and delay are found and followed. Listens on this machine alone by default.
    On SIGTERM or Ctrl-C running answers end first.
    """
    from lezero.serve.server import command
    from lezero.serve.server.config import ServeConfig

    if new_key is not None:
        return command.print_new_key(new_key)
    config = ServeConfig(
        **{"host": host, "port": port, "name": name, "keys": keys, "queue": queue, "rate": rate},
        **{"drain_s": drain, "public_without_keys": public_without_keys, "record": record},
        **{"body_bytes": body_kib << 10, "allow_hosts": tuple(allow_host or ())},
        **({} if p99_ms is None else {"p99_ms": p99_ms}),
    )
    engine = {"weights": weights, "kv": kv, "context": context, "max_requests": max_requests}
    engine |= {"cache_mib": cache_mib, "speculate": speculate, "draft": draft}
    batch_by = {"batch": batch, "delay_ms": delay_ms, "p99_ms": p99_ms}
    return command.serve_any(config, model, module, engine, batch_by)
