"""What `lz serve` does with its words: a key, or a model that is opened and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lezero.core.errors import ConfigError
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.keys import new_key, read_keys


def print_new_key(name: str) -> int:
    """Prints a key and the line for the file of keys."""
    key, line = new_key(name)
    print(f"key for the client, shown this once:  {key}")
    print(f"line for the file of --keys:          {line}")
    return 0


def serve_model(
    model: str,
    config: ServeConfig,
    *,
    weights: Any,
    kv: Any,
    context: int | None,
    max_requests: int,
    cache_mib: int | None,
    speculate: Any,
    draft: str | None,
) -> int:
    """Serves the model at a path until a signal ends it.

    Raises `ConfigError`, before the model is opened, where the address is open to others without
    keys.
    """
    if not model:
        raise ConfigError("model: got none; give a run, a Hugging Face folder or a .gguf file")
    if cache_mib is not None and cache_mib < 1:
        raise ConfigError(f"cache_mib: got {cache_mib}, allowed is 1 or more")
    config.refuse_if_open(bool(len(read_keys(config.keys))))
    from lezero.serve.llm import LLM
    from lezero.serve.server.run import serve

    llm = LLM(
        model,
        weights=weights,
        kv=kv,
        context=context,
        max_requests=max_requests,
        cache_bytes=None if cache_mib is None else cache_mib << 20,
        speculate=speculate,
        draft=draft,
    )
    serve(llm, config, Path(model).resolve().name.removesuffix(".gguf") or "model")
    return 0
