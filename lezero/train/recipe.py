"""From a run config to the pieces of a run, in the order in which they can be composed.

build (on meta, then materialised) → ZeRO, or the data-parallel wrap in the engine → optimizer →
compile (in the engine, block by block) → resume. What comes later in LeZero's life keeps to the
same order: module swaps before the split, the split before recompute, recompute before sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lezero.core import device, groups
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.data import Data, EvalLoader, Loader, TokenizerConfig, prepare
from lezero.data.build import foresee_cache, foresee_rows
from lezero.data.tokenizer import holds_tokenizer
from lezero.models import Transformer, TransformerConfig, load_hf, read_config
from lezero.models.huggingface import read_weights
from lezero.models.rope import Rope
from lezero.optim import AdamW, AdamW8bit
from lezero.parallel.zero import Zero, shard_, sharding_of
from lezero.parallel.zero.materialize import allocate_
from lezero.plan import StepSpec
from lezero.train.config import ModelConfig, RunConfig, TrainConfig
from lezero.train.engine import Engine
from lezero.train.loss import next_token_loss
from lezero.train.metrics import require_tensorboard
from lezero.train.precision import resolve
from lezero.train.room import require_room


def check(config: RunConfig) -> None:
    """Refuses what is wrong before anything is read, made or written."""
    config.micro_batch(groups.world_size())
    if config.report.tensorboard and groups.is_main():
        require_tensorboard()
    _check_folder(config)


def _check_folder(config: RunConfig) -> None:
    """Refuses a model's folder that cannot be read, and a tokenizer that is not the model's: its
    weights would be trained on tokens that they do not know."""
    folder, given = config.model.folder, config.data.tokenizer
    if folder is None:
        return
    read_config(folder)
    holds = holds_tokenizer(Path(folder))
    if holds:
        check_tokenizer(given, folder)
    if not holds and given.folder == folder:
        raise ConfigError(
            f"model.folder: {folder} holds no tokenizer; copy the model's own into it, or name its "
            "place: data.tokenizer={folder: …}"
        )


def check_tokenizer(given: TokenizerConfig, model: str) -> None:
    """Refuses bytes and a tokenizer that would be trained, for a model that has its own."""
    if given.folder is None:
        what = "bytes" if given.train is None else f"{{train: {given.train}}}"
        raise ConfigError(
            f"data.tokenizer: got {what}, but the model in {model} was taught the tokens of the "
            "tokenizer beside it; leave data.tokenizer out, and that is used"
        )


def model_config(config: RunConfig, vocab: int) -> TransformerConfig:
    """The model's full shape; checks that it can read the run's sequences."""
    shape = _shape(config, config.model, vocab)
    if config.model.folder is not None and shape.vocab < vocab:
        advice = f"use the model's own: data.tokenizer={{folder: {config.model.folder}}}"
        if config.data.tokenizer.folder == config.model.folder:
            advice = (
                f"copy the model's own tokenizer into {config.model.folder} again, or make the "
                f"model larger (in transformers: model.resize_token_embeddings({vocab}))"
            )
        raise ConfigError(
            f"model.folder: the model has {shape.vocab} tokens and the tokenizer {vocab}; {advice}"
        )
    if shape.longest < config.data.sequence:
        raise ConfigError(
            f"data.sequence: got {config.data.sequence}, the model reads at most {shape.longest}"
        )
    return shape


def _shape(config: RunConfig, model: ModelConfig, vocab: int) -> TransformerConfig:
    if model.folder is not None:
        return read_config(model.folder)
    return model.transformer(vocab, config.data.sequence)


def build_model(config: RunConfig, vocab: int, decisions: Decisions | None = None) -> Transformer:
    """The model with its first weights, on this rank's device, sharded where the config says so.

    In fp32, or with masters in bf16. A sharded model on the CPU is never whole on any rank.
    """
    place = device.device()
    kind = torch.float32 if config.train.masters == "none" else torch.bfloat16
    shape = model_config(config, vocab)
    if config.zero is not None and place.type == "cpu":
        with torch.device("meta"):
            model = Transformer(shape).to(kind)
    elif config.model.folder is not None:
        model = load_hf(config.model.folder, dtype=kind).to(place)
    else:
        with torch.device(place):
            model = Transformer(shape, seed=config.train.seed).to(kind)
    if config.zero is not None:
        found = zero_of(config, place, decisions or Decisions())
        meta = next(model.parameters()).is_meta
        shard_(model, found, wire=config.wire)
        if meta:
            _fill(model, config)
    return model


def zero_of(config: RunConfig, place: torch.device, decisions: Decisions) -> Zero:
    """The config's `zero`, with the type that its parameters compute in."""
    zero, train = config.zero, config.train
    assert zero is not None
    if zero.compute != "auto":
        return zero
    asked = train.precision
    if asked == "auto" and train.masters != "none":  # of bf16 weights
        asked = "bf16"
    name = resolve(asked, place, decisions)
    if train.masters != "none" and name != "bf16":
        raise ConfigError(
            f"train.masters: '{train.masters}' keeps masters of bf16 weights, but this run's "
            f"precision is {name}; set train.precision=bf16, or masters=none"
        )
    if name == "fp16":
        raise ConfigError("train.precision: fp16 does not go with zero; set bf16 or fp32")
    return zero.model_copy(update={"compute": name})


def _fill(model: Transformer, config: RunConfig) -> None:
    """Memory for a sharded model on meta and this rank's rows of its first weights."""
    allocate_(model)
    for module in model.modules():
        if isinstance(module, Rope):  # its tables are no weights, but on meta they had no values
            module.reset_parameters()
    sharding = sharding_of(model)
    layout = sharding.layout

    def take(name: str, whole: torch.Tensor) -> torch.Tensor:
        sharding.write(name, whole[layout[name].start : layout[name].stop])
        return whole

    if config.model.folder is not None:
        read_weights(config.model.folder, model, take)
        return
    for name, part in layout.items():
        take(name, model.first_weight(name, part.shape, config.train.seed))


def build_optimizer(config: RunConfig, model: nn.Module) -> AdamW | AdamW8bit:
    train = config.train
    kind = {"adamw": AdamW, "adamw8bit": AdamW8bit}[train.optimizer]
    made: AdamW | AdamW8bit = kind(
        model,
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        masters=train.masters,
    )
    return made


def lost_state(now: TrainConfig, before: Mapping[str, Any]) -> str:
    """The change since `before`, a checkpoint's `train` section, to an optimizer that cannot take
    over the state; empty where it can."""
    optimizer = before.get("optimizer", "adamw")
    return "" if optimizer == now.optimizer else f"train.optimizer: {optimizer} → {now.optimizer}"


def build_engine(config: RunConfig, model: nn.Module, decisions: Decisions) -> Engine:
    """The engine of the run, its optimizer built last."""
    train = config.train
    return Engine(
        model,
        build_optimizer(config, model),
        loss=next_token_loss,
        counted="tokens",
        precision=train.precision,
        accumulate=train.accumulate,
        clip=train.clip,
        schedule=train.schedule,
        total_steps=train.steps,
        compile=train.compile,
        attention=train.attention,
        pool=train.pool,
        max_skipped=train.max_skipped,
        seed=train.seed,
        decisions=decisions,
    )


def build_data(config: RunConfig) -> Data:
    """Tokenizer and token files of the run; rank 0 makes them, the others wait."""
    return prepare(config.data)


def loaders(config: RunConfig, data: Data) -> tuple[Loader, EvalLoader | None]:
    """Training and validation batches of this rank.

    Those of validation are micro-batches: a pass of `train.batch` sequences may not fit.
    """
    rank, world = groups.rank(), groups.world_size()
    micro, parts = config.micro_batch(world) * world, config.train.accumulate
    train = Loader(data.train, config.train.batch, seed=config.data.seed, rank=rank, world=world)
    if data.validation is None or not config.validation.every:
        return train, None
    limit = config.validation.batches
    limit = limit and limit * parts
    return train, EvalLoader(data.validation, micro, rank=rank, world=world, limit=limit)


def plan_inputs(
    config: RunConfig, vocab: int | None = None, world: int | None = None
) -> tuple[Callable[[], nn.Module], StepSpec]:
    """What the forecast needs: a builder of the model (call it in a fake mode) and the step.

    Without `vocab` the tokenizer's size is taken from the config, as if training reached it. The
    builder raises `CapacityError` for a model whose state alone cannot fit.
    """
    world = groups.world_size() if world is None else world
    _check_folder(config)
    if vocab is None:
        foresee_rows(config.data)
        foresee_cache()
    entries = planned_vocab(config) if vocab is None else vocab
    shape = model_config(config, entries)
    place = device.device()
    zero = None if config.zero is None else zero_of(config, place, Decisions())
    computes = config.train.precision if zero is None else zero.compute
    spec = StepSpec(
        batch=config.micro_batch(world),
        tokens=config.data.sequence,
        accumulate=config.train.accumulate,
        precision=resolve(computes, place, Decisions()),
        form=_form(config),
        ranks=world,
        pool=config.train.pool and place.type == "cpu",
        clip=config.train.clip is not None,
        optimizer=lambda model: build_optimizer(config, model),
        loss=next_token_loss,
        saves=True,  # the last generation, if no other
        attention=config.train.attention,
        steps=config.train.steps,
        device=place.type,
        zero=zero,
        wire=config.wire,
    )
    kind = torch.float32 if config.train.masters == "none" else torch.bfloat16

    def build() -> nn.Module:
        require_room(config, lambda model: _shape(config, model, entries), spec)
        model = Transformer(shape)
        for module in model.modules() if kind != torch.float32 else ():
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, nn.Parameter(parameter.detach().to(kind)))
        return model

    return build, spec


def planned_vocab(config: RunConfig) -> int:
    """The tokenizer's size before there is one: what training it may reach at most."""
    tokenizer = config.data.tokenizer
    if tokenizer.train is not None:
        return tokenizer.train
    if tokenizer.folder is not None:
        from lezero.data import load_tokenizer

        return load_tokenizer(tokenizer.folder).vocab_size
    return 257


def _form(config: RunConfig) -> str:
    """What the forecast assumes of "auto": most runs on CPU stay eager."""
    asked = config.train.compile
    return "eager" if asked in ("auto", "off") else asked
