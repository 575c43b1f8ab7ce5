"""`lz compress`: a model from files in, a quantized model out, measured before it is kept."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lezero.compress.quantize import (
    QuantizationReport,
    is_quantized_folder,
    quantization_report,
    quantize_,
    save_quantized,
)
from lezero.compress.quantize.modules import quantized_layers
from lezero.compress.quantize.saved import beside_tokenizer
from lezero.core.errors import ConfigError, FileError, LeZeroError
from lezero.core.facts import cache_folder
from lezero.core.log import say
from lezero.data import EvalLoader, TokenizerConfig, prepare
from lezero.data.store import IGNORED, TokenRows
from lezero.data.tokenizer import holds_tokenizer
from lezero.files.folder import aside, contents
from lezero.hub.foreign import is_foreign, load_foreign
from lezero.hub.opened import open_model
from lezero.jobs.compress_config import CompressConfig
from lezero.jobs.perplexity import perplexity
from lezero.models import Transformer, gguf_tokenizer
from lezero.report.units import span
from lezero.train.recipe import check_tokenizer


@dataclass(frozen=True)
class Compressed:
    """What came of it. Perplexity is that of held-out text."""

    folder: Path
    report: QuantizationReport
    perplexity_before: float
    perplexity_after: float

    def __str__(self) -> str:
        times = self.perplexity_after / self.perplexity_before
        return f"{self.report}\nperplexity / before: {times:.4f}\nsaved: {self.folder}"


def compress(config: CompressConfig) -> Compressed:
    """Quantizes the model that `config` names and writes it to `config.out`.

    Nothing is written when anything fails: a budget that is not met (`NumericsError`, with the
    layers to blame), a model or data that cannot be read (`FileError`, `ConfigError`), or no layer
    that became faster (`LeZeroError`; the report is printed).
    """
    _check_out(config)
    with aside(cache_folder() / "spill", "tokenizer") as made:  # gone later even if killed
        model, folder = _open(config, made)
        calibration, held = _rows(config, model, folder)
        tokenizer = folder if holds_tokenizer(folder) else None
        beside_tokenizer(tokenizer)  # what is wrong there is told before the work
        quantize_(
            model,
            config.scheme,
            data=calibration or None,
            filter=config.filter,
            objective=config.objective,
            metric=_told(held),
            budget=config.budget,
        )
        report = quantization_report(model)
        report.metric_name = "perplexity on held-out text"
        if not quantized_layers(model):
            print(report, flush=True)
            raise LeZeroError(
                f"none of {len(report.layers)} layers became faster on this machine's processor, "
                "so nothing was written; objective: size makes the model smaller all the same"
            )
        before, after = report.quality_before, report.quality_after
        assert before is not None
        assert after is not None
        out = _free(Path(config.out))
        saved = save_quantized(model, out, tokenizer_folder=tokenizer, layout=config.layout)
        return Compressed(saved, report, before, after)


def _told(held: list[dict[str, Tensor]]) -> Callable[[nn.Module], float]:
    """Perplexity on `held`, with lines for those who wait: it takes hours where a processor lacks
    the type of the weights."""
    left = ["of the model as it is"]

    def metric(model: nn.Module) -> float:
        which = left.pop() if left else "after quantization"
        logits, begun = _logits_of(model), time.monotonic()
        done = 0

        def forward(tokens: Tensor) -> Tensor:
            nonlocal done
            found, done = logits(tokens), done + 1
            if done == 1:
                seconds = span((time.monotonic() - begun) * len(held))
                say(f"perplexity {which}: {len(held)} batches, some {seconds}")
            return found

        value = perplexity(forward, held)
        if which.endswith("as it is"):
            say("calibrating and quantizing, block by block")
        return value

    return metric


def _open(config: CompressConfig, spare: Path) -> tuple[nn.Module, Path]:
    """The model, and the folder that holds its tokenizer."""
    if is_quantized_folder(config.model):
        raise ConfigError(
            f"model: {config.model} holds quantized weights; give the folder of the float model"
        )
    if is_foreign(config.model):
        if config.layout != "lezero":
            raise ConfigError(
                f"layout: got {config.layout!r}, allowed is 'lezero' for {config.model}: the other "
                "is written of models that lezero.models has"
            )
        return load_foreign(config.model), Path(config.model)
    model, folder = open_model(config.model)
    if folder is None:
        folder = spare
        gguf_tokenizer(config.model, save_to=str(folder))
    return model, folder


def _logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    if isinstance(model, Transformer):
        return model
    return lambda tokens: model(tokens).logits


def _limits(model: nn.Module) -> tuple[int, int]:
    """How many tokens its texts may have, and how many it knows."""
    if isinstance(model, Transformer):
        return model.config.longest, model.config.vocab
    foreign: Any = model
    about = foreign.config.get_text_config()
    return int(getattr(about, "max_position_embeddings", None) or sys.maxsize), about.vocab_size


def _check_out(config: CompressConfig) -> None:
    out, model = Path(config.out), Path(config.model)
    if not model.exists():
        raise FileError(f"model: {model}: no such file or folder")
    if out.resolve() == model.resolve():
        raise ConfigError(f"out: got {out}, which is the model itself; name another folder")
    if out.exists() and (not out.is_dir() or contents(out)):
        raise ConfigError(f"out: {out} is there already; name a new folder")
    place = out.absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written to" if there.is_dir() else "is a file"
        raise FileError(f"out: {out}: {there} {what}; name another folder")


def _free(out: Path) -> Path:
    """`out`, or where something was written to it meanwhile, a name beside it."""
    names = itertools.chain(
        [out], map(out.with_name, (f"{out.name}-{n}" for n in itertools.count(2)))
    )
    free = next(x for x in names if not x.exists() or (x.is_dir() and not contents(x)))
    if free != out:
        say(f"{out} was written to meanwhile; this model goes to {free}")
    return free


def _rows(
    config: CompressConfig, model: nn.Module, folder: Path
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Calibration batches (B, T) and held-out batches, in the model's own tokens."""
    data = config.data
    if "tokenizer" in data.model_fields_set:
        if holds_tokenizer(folder):
            check_tokenizer(data.tokenizer, config.model)
    else:
        data = data.model_copy(update={"tokenizer": TokenizerConfig(folder=str(folder))})
    longest, vocab = _limits(model)
    if data.sequence > longest:
        raise ConfigError(
            f"data.sequence: got {data.sequence}, which is more than the model's context of "
            f"{longest}"
        )
    found = prepare(data)
    if found.tokenizer.vocab_size > vocab:
        raise ConfigError(
            f"data.tokenizer: it has {found.tokenizer.vocab_size} tokens, the model only "
            f"{vocab}; leave it out, and the model's own is used"
        )
    if found.validation is None:
        raise ConfigError("data.validation: nothing is held out, so perplexity cannot be measured")
    calibration = _full(found.train, config.calibration_rows, config.batch)
    return calibration, _first(found.validation, config.validation_rows, config.batch)


def _full(rows: TokenRows, count: int, batch: int) -> list[Tensor]:
    """Batches of `count` rows without what fills rows up, which would calibrate too: the texts,
    prompts among them, one behind the other. Where the data ends before a row is full, that one is
    left out, unless it is the only one."""
    parts: list[np.ndarray] = []
    missing = count * rows.sequence
    for index in range(len(rows)):
        if missing <= 0:
            break
        tokens, targets = rows.row(index)
        counted = np.flatnonzero(targets != IGNORED)
        if len(counted):  # a pair may be its end of text alone
            parts.append(tokens[: counted[-1] + 2])  # a target is the token behind its own
            missing -= len(parts[-1])
    if not parts:
        return []
    text = torch.from_numpy(np.concatenate(parts))
    width = min(rows.sequence, len(text))
    full = text[: len(text) // width * width].view(-1, width)
    return list(full.split(min(batch, len(full))))


def _first(rows: TokenRows, count: int, batch: int) -> list[dict[str, Tensor]]:
    """The first `count` rows or what there is, in batches; the last may be smaller, since a loader
    fills it up with rows without loss."""
    left = min(count, len(rows))
    made: list[dict[str, Tensor]] = []
    for full in EvalLoader(rows, min(batch, max(1, left))):
        if not left:
            break
        made.append({name: part[:left] for name, part in full.items()})
        left -= len(made[-1]["tokens"])
    return made
