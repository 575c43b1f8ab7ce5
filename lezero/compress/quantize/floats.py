"""Floating-point and table formats: `Fp8` and `Nf4`.

Weights are decoded at each use: for size. `Fp8(activations="token")` multiplies in float8 where a
GPU has units for it: for speed.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from lezero.compress.quantize.scheme import Scheme, Target, check_group, check_rule, group_for
from lezero.compress.quantize.sites import Site
from lezero.ops.quantize import Grid


class Fp8(Scheme):
    """Weights as float8_e4m3fn (Micikevicius et al., "FP8 Formats for Deep Learning", 2022,
    arXiv:2209.05433): 8 bits with four of exponent, for weights of very different sizes."""

    activations: Literal["float", "token"] = "float"
    """Inputs of linear layers: "float", as they are, times the decoded weight; "token", rounded to
    float8 with a scale for each token as it comes. An NVIDIA GPU from compute capability 8.9 on
    then multiplies float8 (bf16 models; inputs and outputs multiples of 16), which is faster than
    bf16 in prompts and batches; elsewhere it only costs time. Those of an output head stay."""
    group: int | Literal["row", "tensor"] = "row"
    """Inputs of linear layers that share a scale: "row", "tensor", or a multiple of 32 that divides
    them. Of embeddings and convolutions each row has one."""
    scales: str = "minmax"
    """Which range of weights a scale covers: "minmax" or "mse"; of rows and tensors also
    "percentile" or "kl"."""
    vocabulary: Literal["fp8", "keep"] = "fp8"
    """Token embeddings and output head."""

    _group = field_validator("group")(lambda cls, value: check_group(value, tensor=True))
    _scales = field_validator("scales")(lambda cls, value: check_rule(value))

    @model_validator(mode="after")
    def _rows(self) -> Self:
        if self.activations == "token" and self.group != "row":
            raise ValueError("group: with activations='token' allowed is 'row'")
        return self

    def target(self, site: Site) -> Target | None:
        if site.is_vocabulary and self.vocabulary == "keep":
            return None
        group = group_for(site, self.group) if site.kind == "linear" else "row"
        rounds = site.kind == "linear" and not site.is_vocabulary
        activations = self.activations if rounds else "float"
        return Target(Grid("fp8", group=group), activations, has_kernel=False)


class Nf4(Scheme):
    """Weights of linear layers as 4-bit NormalFloat (Dettmers et al., "QLoRA", 2023,
    arXiv:2305.14314): 16 values that normally distributed weights use equally often."""

    group: int = Field(default=64, ge=2)
    """Inputs that share a scale; it divides all layers' inputs."""
    scales: str = "minmax"
    """Which range of weights a scale covers: "minmax" or "mse"."""
    vocabulary: Literal["int8", "nf4", "keep"] = "int8"
    """Token embeddings and output head."""

    _scales = field_validator("scales")(lambda cls, value: check_rule(value))

    def target(self, site: Site) -> Target | None:
        if site.is_vocabulary and self.vocabulary != "nf4":
            return None if self.vocabulary == "keep" else Target(Grid("int8"))
        if site.kind != "linear" and not site.is_vocabulary:
            return None
        grid = Grid("nf4", group=group_for(site, self.group, 1), scale_dtype="fp16")
        return Target(grid, has_kernel=False)
