"""int4: `Int4Weight` (W4A16)."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from lezero.compress.quantize.methods import check_method
from lezero.compress.quantize.scheme import Scheme, Target, check_group, check_rule, group_for
from lezero.compress.quantize.sites import Site
from lezero.ops.quantize import Grid


class Int4Weight(Scheme):
    """Weights of linear layers in int4: a quarter of the size of bf16 and a small loss, which
    "gptq" or "awq" with calibration data make smaller. Convolutions stay as they are."""

    group: int | Literal["row"] = 64
    """Inputs that share a scale: a multiple of 32 that divides all layers' inputs, or "row"."""
    zero_point: bool = True
    """Whether each group also has a zero point: 16 codes for its own range, 0.25 bits more at a
    group of 64."""
    activations: Literal["float", "token"] = "float"
    """"float": taken in 16-bit fixed point, as `Int8Weight` does; "token": each token is rounded to
    int8, for prompts and batches (W4A8). Those of an output head stay."""
    method: str = "nearest"
    """How codes are found: "nearest", "hqq" (no data), "gptq" or "awq" (with data)."""
    scales: str = "mse"
    """Which range of weights a scale covers: "mse" or "minmax"; of rows also "percentile" or
    "kl"."""
    bias_correction: bool = False
    """Take the mean error of the outputs out of the bias (needs data)."""
    vocabulary: Literal["int8", "int8_activations", "int4", "keep"] = "int8"
    """Token embeddings and output head, which lose more at 4 bits than other layers:
    "int8_activations" rounds the head's inputs too, each token to int8, whose error no later layer
    evens out; "keep" leaves both as they are."""

    _group = field_validator("group")(lambda cls, value: check_group(value))
    _method = field_validator("method")(lambda cls, value: check_method(value))
    _scales = field_validator("scales")(lambda cls, value: check_rule(value))

    def target(self, site: Site) -> Target | None:
        if site.is_vocabulary and self.vocabulary != "int4":
            rounds = self.vocabulary == "int8_activations" and site.kind == "linear"
            eight = Target(Grid("int8"), "token" if rounds else "float")
            return None if self.vocabulary == "keep" else eight
        if site.kind != "linear" and not site.is_vocabulary:
            return None
        group = group_for(site, self.group)
        grid = Grid("int4", group=group, zero_point=self.zero_point, scale_dtype="fp16")
        return Target(grid, "float" if site.is_vocabulary else self.activations)
