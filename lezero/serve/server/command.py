"""What `lz serve` does with its words: a key, or a model that is opened and served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lezero.core.errors import ConfigError, FileError
from lezero.core.paths import expand_home
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.keys import new_key, read_keys

if TYPE_CHECKING:
    from lezero.serve.batching.plan import Plan

_MOST_REQUESTS = 32
"""That run at once, where nobody says how many."""


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
    batching: Mapping[str, Any],
    weights: Any,
    kv: Any,
    context: int | None,
    max_requests: int | None,
    cache_mib: int | None,
    speculate: Any,
    draft: str | None,
) -> int:
    """Serves the model at a path until a signal ends it. batching: options of other models.

    Raises `ConfigError`, before the model is opened, where the address is open to others without
    keys, or is taken, the model is a folder of weights alone, or an option is not allowed, and
    `FileError` where there is no model at its path.
    """
    if not model:
        raise ConfigError(
            "model: got none; give a run, a Hugging Face folder or a .gguf file, or --module"
        )
    if cache_mib is not None and cache_mib < 1:
        raise ConfigError(f"cache_mib: got {cache_mib}, allowed is 1 or more")
    _check_address(config)
    from lezero.hub.opened import require_model

    for place in (model, expand_home(draft or model)):
        if not Path(place).exists():
            raise FileError(f"{place}: no such file or folder")
    require_model(Path(model))
    _refuse("a language model", batching)
    _check_tokenizer(Path(model))
    from lezero.profiler.hardware import hardware
    from lezero.serve.forecast import resident_bytes
    from lezero.serve.llm import LLM
    from lezero.serve.options import check_options
    from lezero.serve.server.record import record_of
    from lezero.serve.server.run import serve

    most = _MOST_REQUESTS if max_requests is None else max_requests
    sizes: dict[str, Any] = {"context": context, "max_requests": most}
    sizes["cache_bytes"] = None if cache_mib is None else cache_mib << 20
    check_options(model, weights, kv, speculate, draft, **sizes)
    name = Path(model).resolve().name.removesuffix(".gguf") or "model"
    record = record_of(config.record, config.name or name, model)
    hardware()  # measures the machine once, so that speeds can be forecast
    before = resident_bytes()
    llm = LLM(model, weights=weights, kv=kv, speculate=speculate, draft=draft, **sizes)
    record.take_engine(llm, weights=weights, kv=kv)
    serve(llm, config, name, before=before, record=record)
    return 0


def serve_encoder(model: str, config: ServeConfig, *, weights: Any, plan: Plan | None) -> int:
    """Serves the sentence encoder in a folder until a signal ends it."""
    _check_address(config)
    from lezero.serve.batching.encoder import SentenceEncoder
    from lezero.serve.server.batched import BatchServer, serve_batched
    from lezero.serve.server.record import record_of

    name = Path(model).resolve().name or "model"
    record = record_of(config.record, config.name or name, model)
    encoder = SentenceEncoder(model, weights, record.decisions)
    serve_batched(BatchServer(encoder, config, name, plan, record))
    return 0


def serve_module(words: str, config: ServeConfig, *, plan: Plan | None) -> int:
    """Serves the module that a function makes (see `module_of`) until a signal ends it."""
    _check_address(config)
    from lezero.serve.batching.module import module_of
    from lezero.serve.server.batched import BatchServer, serve_batched
    from lezero.serve.server.record import record_of

    name = words.partition(":")[2]
    record = record_of(config.record, config.name or name, words)
    module = module_of(words)
    serve_batched(BatchServer(module, config, name, plan, record))
    return 0


def serve_any(
    config: ServeConfig,
    model: str,
    module: str,
    engine: Mapping[str, Any],
    batching: Mapping[str, Any],
) -> int:
    """Serves what the words of `lz serve` name. engine: options of language models. batching:
    `batch` and `delay_ms`, and whether `p99_ms` was given, which the config holds.

    Raises `ConfigError` for an option that does nothing with such a model.
    """
    from lezero.hub.encoder import is_encoder

    model = expand_home(model)
    if module:
        _refuse("--module", {"model": model, **engine})
        return serve_module(module, config, plan=_plan(batching, config.p99_ms))
    if model and is_encoder(model):
        _refuse("an encoder", {name: x for name, x in engine.items() if name != "weights"})
        plan = _plan(batching, config.p99_ms)
        return serve_encoder(model, config, weights=engine["weights"], plan=plan)
    return serve_model(model, config, batching=batching, **engine)


def _check_address(config: ServeConfig) -> None:
    """Tells what is wrong with the address before minutes have gone into a model."""
    config.refuse_if_open(bool(len(read_keys(config.keys))))
    from lezero.serve.server.host import need_uvicorn, refuse_if_taken

    need_uvicorn()
    refuse_if_taken(config)


def _check_tokenizer(folder: Path) -> None:
    from lezero.data.tokenizer import holds_tokenizer

    if (folder / "config.json").is_file() and not holds_tokenizer(folder):
        raise ConfigError(
            f"model: {folder} holds no tokenizer, without which answers have no text; copy the "
            "files of the model's into it (tokenizer.json, tokenizer_config.json). lz.LLM opens "
            "language models without one, for prompts that are tokens; lz serve --module serves "
            "models of other kinds"
        )


def _refuse(what: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value not in (None, "", "auto", "off"):
            raise ConfigError(f"{name}: got {value}, which has no meaning for {what}; leave it out")


def _plan(batching: Mapping[str, Any], p99_ms: float) -> Plan | None:
    """The plan of --batch and --delay-ms; None where neither is given, so that one is found."""
    from lezero.serve.batching.batcher import MOST
    from lezero.serve.batching.plan import Plan

    batch, delay_ms = batching["batch"], batching["delay_ms"]
    if batch is None and delay_ms is None:
        return None
    if batch is not None and not 1 <= batch <= MOST:
        raise ConfigError(f"batch: got {batch}, allowed is 1 to {MOST}")
    if delay_ms is not None and not 0 <= delay_ms < p99_ms:
        raise ConfigError(
            f"delay_ms: got {delay_ms:g}, allowed is 0 to less than the {p99_ms:g} of --p99-ms, "
            "in which requests are to be answered"
        )
    return Plan(batch or MOST, delay_s=(delay_ms or 0.0) / 1000)
