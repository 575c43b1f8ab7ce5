"""The config of a training run: one YAML file, one section a concern.

    run: runs/first
    model: {layers: 8, dim: 512, heads: 8}
    data: {train: [corpus.txt], tokenizer: {train: 2048}, sequence: 256}
    train: {steps: 1000, batch: 8, lr: 3e-4}

`lz config show FILE` prints every value with its default, `lz config schema` a schema for editors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.config import Config, PathText, read_yaml, set_path
from lezero.core.errors import ConfigError, Problem
from lezero.core.log import logger
from lezero.data import DataConfig, TokenizerConfig
from lezero.models import TransformerConfig
from lezero.models.config import RopeScaling
from lezero.optim import Schedule
from lezero.parallel.zero import Zero

_Beta = Annotated[float, Field(ge=0, lt=1)]
_MOST = 1 << 40
"""Of what counts steps and the like."""
_log = logger("train")


class ModelConfig(Config):
    """The model: a new transformer of the Llama family, or one that is loaded from `folder`."""

    folder: PathText | None = None
    """A Hugging Face folder to start from, which brings its own shape: then no other key of this
    section may be given (or all of them, each with its default, as in a run's config.yaml). Its
    tokenizer is used where `data` names none."""
    layers: int = Field(8, ge=1, le=4096)
    dim: int = Field(512, ge=2, le=1 << 20)
    heads: int = Field(8, ge=1, le=1 << 14)
    kv_heads: int | None = Field(None, ge=1, le=1 << 14)
    """Key and value heads; as many as `heads` if not given."""
    head_dim: int | None = Field(None, ge=2, le=1 << 14)
    """Width of one head; dim / heads if not given."""
    ffn: int | None = Field(None, ge=1, le=1 << 22)
    """Width inside SwiGLU; 8/3 of `dim`, to the nearest multiple of 64, if not given."""
    vocab: int | None = Field(None, ge=2, le=1 << 24)
    """Vocabulary; the tokenizer's, rounded up to a multiple of 64, if not given."""
    context: int | None = Field(None, ge=1, le=1 << 28)
    """Longest sequence that the model knows; `data.sequence` if not given."""
    rope_theta: float | None = Field(None, gt=1)
    rope_scaling: RopeScaling | None = None
    norm_eps: float | None = Field(None, gt=0, le=1)
    tied: bool = True
    """The head shares the embedding's weights."""
    qk_norm: bool = False
    sliding_window: int | None = Field(None, ge=1, le=1 << 28)

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = type(self).model_fields
        others = [k for k in fields if k != "folder" and getattr(self, k) != fields[k].default]
        given = [k for k in fields if k != "folder" and k in self.model_fields_set]
        if len(given) < len(fields) - 1:
            others = given
        if self.folder is not None and others:
            raise ValueError(f"folder brings its own shape: remove {', '.join(others)}")
        if self.folder is None:
            self.transformer(vocab=1, sequence=1)  # its checks across fields hold here already
        return self

    def transformer(self, vocab: int, sequence: int) -> TransformerConfig:
        """The full model config for a tokenizer of `vocab` entries."""
        size = self.vocab or -(-vocab // 64) * 64
        if size < vocab:
            raise ConfigError(
                f"model.vocab: got {size}, but the tokenizer has {vocab} entries; "
                "leave model.vocab out or raise it"
            )
        own = self.model_dump(exclude={"folder", "vocab", "context"}, exclude_none=True)
        return TransformerConfig(vocab=size, context=self.context or sequence, **own)


class TrainConfig(Config):
    """The loop. `batch` counts sequences of one optimizer step over all ranks."""

    steps: int = Field(1000, ge=1, le=_MOST)
    batch: int = Field(8, ge=1, le=1 << 24)
    accumulate: int = Field(1, ge=1, le=1 << 24)
    """Micro-batches that a rank's part of the batch is cut into."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit keeps the moments in 8 bits: 2 bytes a parameter instead of 8."""
    masters: Literal["none", "fp32", "remainder"] = "none"
    """Weights in bf16 with an exact fp32 master each: whole (fp32), or the 16 bits that the weight
    lacks (remainder). Needs the section `zero` and precision bf16."""
    lr: float = Field(3e-4, gt=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    """Not applied to norms, biases and embeddings."""
    clip: float | None = Field(1.0, gt=0)
    """The largest gradient norm; null clips nothing."""
    schedule: Schedule = Schedule()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: Literal["auto", "off", "blocks", "step"] = "auto"
    """auto measures in the first steps whether compiling earns its time back in this run."""
    attention: Literal["auto", "torch", "lezero"] = "auto"
    """Whose attention kernel: auto measures LeZero's against torch's in the first steps."""
    pool: bool = True
    """Keep host memory blocks between steps."""
    seed: int = Field(0, ge=0, lt=2**31)
    max_skipped: int = Field(10, ge=1, le=_MOST)
    """Non-finite steps in a row that end the run."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.masters != "none" and self.precision not in ("auto", "bf16"):
            raise ValueError(f"masters are of bf16 weights, but precision is {self.precision}")
        return self


class ValidationConfig(Config):
    every: int = Field(100, ge=0, le=_MOST)
    """Steps between validations; 0 for none."""
    batches: int | None = Field(None, ge=1, le=_MOST)
    """Batches of `train.batch` sequences a validation, computed in micro-batches as those of
    training are; all if not given."""


class CheckpointConfig(Config):
    every: int = Field(100, ge=0, le=_MOST)
    """Steps between generations; 0 for the last one only."""
    keep: int = Field(3, ge=1, le=_MOST)
    resume: bool = True
    """Go on from the newest good generation of the run's folder where there is one."""


class ReportConfig(Config):
    tensorboard: bool = False
    """Write TensorBoard events into the run's folder (extra `tensorboard`)."""
    samples: tuple[str, ...] = ("The ",)
    """Prompts that the trained model continues for the report."""
    sample_tokens: int = Field(64, ge=0, le=1 << 28)


class RunConfig(Config):
    """Everything about one run."""

    run: PathText = Field("runs/latest", min_length=1)
    """Folder of the run: config, metrics, decisions, checkpoints, report."""
    model: ModelConfig = ModelConfig()
    data: DataConfig
    train: TrainConfig = TrainConfig()
    zero: Zero | None = None
    """How the training state is split over the ranks; not at all if not given."""
    wire: Wire = Wire()
    """How the ranks of a split state exchange; needs the section `zero`."""
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        train, zero, sequence = self.train, self.zero, self.data.sequence
        if self.model.folder is None:
            longest = self.model.transformer(vocab=1, sequence=sequence).longest
            if longest < sequence:
                reason = f"got {sequence}, the model reads at most {longest} (model.context)"
                problem = Problem(("data", "sequence"), sequence, reason)
                raise ConfigError(str(problem), (problem,))
        if zero is None:
            for name, given in (
                ("wire", self.wire != Wire()),
                ("train.masters", train.masters != "none"),
            ):
                if given:
                    raise ValueError(f"{name} needs the section zero; stage 0 splits nothing")
            return self
        if train.precision == "fp16":
            raise ValueError("train.precision fp16 does not go with zero; use bf16")
        if train.precision != "auto" and zero.compute not in ("auto", train.precision):
            raise ValueError(
                f"zero.compute is {zero.compute} and train.precision {train.precision}; give one"
            )
        if train.masters != "none" and zero.compute == "fp32":
            raise ValueError("train.masters are of bf16 weights, but zero.compute is fp32")
        return self

    @model_validator(mode="after")
    def _with_the_models_tokenizer(self) -> Self:
        folder = self.model.folder
        if folder is not None and "tokenizer" not in self.data.model_fields_set:
            own = {"tokenizer": TokenizerConfig(folder=folder)}
            object.__setattr__(self, "data", self.data.model_copy(update=own))
        return self

    @model_validator(mode="after")
    def _warn_of_long_warmup(self) -> Self:
        """No error, since a run may be meant to go on later with more steps."""
        warmup, steps = self.train.schedule.warmup, self.train.steps
        if warmup > steps and groups.is_main():
            _log.warning(
                "train.schedule.warmup: got %d, but the run ends after train.steps of %d, where "
                "the learning rate is %.3g and not yet train.lr, %.3g; lower the warm-up, or raise "
                "train.steps",
                *(warmup, steps),
                *(self.train.lr * self.train.schedule.factor(steps - 1, steps), self.train.lr),
            )
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> Self:
        """Reads a YAML file and applies `a.b=value` overrides; `ConfigError` explains problems."""
        data: dict[str, Any] = read_yaml(str(path))
        for assignment in overrides or []:
            set_path(data, assignment)
        return cls.parse(data, str(path))

    def micro_batch(self, world: int) -> int:
        """Sequences of one micro-batch on one of `world` ranks."""
        parts = world * self.train.accumulate
        if self.train.batch % parts:
            raise ConfigError(
                f"train.batch: got {self.train.batch}, which {world} rank(s) of "
                f"accumulate={self.train.accumulate} cannot share evenly; "
                f"use a multiple of {parts}"
            )
        return self.train.batch // parts
