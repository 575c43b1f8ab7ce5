"""int8: `Int8Weight` (W8A16) and `Int8WeightActivation` (W8A8)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from lezero.compress.quantize.methods import check_method, methods
from lezero.compress.quantize.scheme import Scheme, Target, check_group, check_rule, group_for
from lezero.compress.quantize.sites import Site
from lezero.ops.quantize import Grid


class Int8Weight(Scheme):
    """Weights in int8, activations in 16 bits: half the size of bf16, nearly no loss.

    Activations are taken in fixed point, each to 1.6e-5 of the largest of its block of 128 inputs
    or fewer; calibration data shows where values beside massive ones lose by that, and the report
    names the layers.

    Reading weights, which limits one token at a time, takes half as long. Convolutions have no
    such kernel: they are stored in int8 and decoded at each use, with `objective="size"`.
    """

    group: int | Literal["row", "tensor"] = "row"
    """Inputs of linear layers that share a scale: "row" (each output channel), "tensor", or a
    multiple of 32. Of the vocabulary and of embeddings each row has one."""
    zero_point: bool = False
    """Whether 0 may lie elsewhere than in the middle of the codes."""
    method: str = "nearest"
    """How codes are found: "nearest", "gptq", "awq" or "hqq"."""
    scales: str = "minmax"
    """Which range of weights a scale covers: "minmax" or "mse"; of rows and tensors also
    "percentile" or "kl"."""
    bias_correction: bool = False
    """Take the mean error of the outputs out of the bias (needs data)."""
    vocabulary: Literal["int8", "keep"] = "int8"
    """Token embeddings and output head."""

    _group = field_validator("group")(lambda cls, value: check_group(value, tensor=True))
    _method = field_validator("method")(lambda cls, value: check_method(value))
    _scales = field_validator("scales")(lambda cls, value: check_rule(value))

    def target(self, site: Site) -> Target | None:
        if site.is_vocabulary and self.vocabulary == "keep":
            return None
        if site.kind == "conv":
            return Target(Grid("int8"), has_kernel=False)
        rows = site.is_vocabulary or site.kind == "embedding"
        group = "row" if rows else group_for(site, self.group)
        kept: Literal["fp16", "fp32"] = "fp16" if isinstance(group, int) else "fp32"
        return Target(Grid("int8", group, self.zero_point, kept))


class Int8WeightActivation(Scheme):
    """Weights and activations in int8: products in whole numbers, for prompts and batches.

    Linear layers round each token with a scale of its own; convolutions take one scale for the
    whole input from the calibration data, and without data stay as they are. Outlier channels of
    activations, which would cost accuracy, are moved into the weights (SmoothQuant).
    """

    activations: Literal["token", "tensor"] = "token"
    """Scales of linear layers' inputs: of each token as it comes, or one from the calibration."""
    group: int | Literal["row"] = "row"
    """Inputs of linear layers that share a weight scale: "row" (each output channel) or a multiple
    of 32. In groups of 64 weights lose less, above all those that outlier channels were moved into,
    for 3% more bytes and a few percent of the speed; with AMX, whose products run over a whole row,
    for a third of it."""
    observer: str = "minmax"
    """Which range of activations one scale covers: "minmax", "percentile", "kl" or "mse"."""
    smooth: float | Literal["auto"] | None = Field(default="auto")
    """SmoothQuant's α, between 0 and 1; "auto": for each group of layers the best of six; None:
    without. Needs data. A method that scales channels by itself, "awq", takes its place: no α."""
    exact_above: float | None = Field(default=2.0, gt=0)
    """A linear layer whose outputs lose more than this many times what they lose in the middle one
    of all layers, by the rounding of its inputs, takes these with a scale for each 32 of them (a
    third more time for that layer) where that loses less and is faster than 16 bits, else in 16
    bits (twice the time); None: none does. Needs data, and scales of each token."""
    method: str = "nearest"
    """How codes are found: "nearest", "gptq" or "awq"."""
    scales: str = "minmax"
    """Which range of weights a scale covers: "minmax" or "mse"; of rows and tensors also
    "percentile" or "kl"."""
    bias_correction: bool = False
    """Take the mean error of the outputs out of the bias (needs data)."""
    fold_batch_norm: bool = True
    """Multiply batch norms into the convolutions before them (needs data)."""
    vocabulary: Literal["int8", "int8_activations", "keep"] = "int8"
    """Token embeddings and output head: "int8" rounds weights only; "int8_activations" the head's
    inputs too, whose error no later layer evens out (in SmolLM2-135M it is twice that of the inputs
    of all other layers); "keep" leaves both as they are."""

    _group = field_validator("group")(lambda cls, value: check_group(value))
    _method = field_validator("method")(lambda cls, value: check_method(value))
    _rules = field_validator("scales", "observer")(lambda cls, value: check_rule(value))

    @field_validator("smooth")
    @classmethod
    def _smooth(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and not 0 <= value <= 1:
            raise ValueError("allowed is a number from 0 to 1, 'auto' or null")
        return value

    @model_validator(mode="after")
    def _one_scaling(self) -> Self:
        if isinstance(self.smooth, float) and methods.get(self.method).scales_channels:
            raise ValueError(
                f"smooth: got {self.smooth}, which method={self.method!r} does not take, since it "
                "finds the scales of channels by itself; leave it out, or take another method"
            )
        return self

    def target(self, site: Site) -> Target | None:
        if site.is_vocabulary and self.vocabulary == "keep":
            return None
        if site.kind == "conv":
            return Target(Grid("int8"), "tensor")
        exact = site.is_vocabulary and self.vocabulary != "int8_activations"
        if exact or site.kind == "embedding":
            return Target(Grid("int8"))
        group = group_for(site, self.group)
        kept: Literal["fp16", "fp32"] = "fp16" if isinstance(group, int) else "fp32"
        return Target(Grid("int8", group, scale_dtype=kept), self.activations)
