"""The config of `lz compress`.

model: runs/a                 # a Hugging Face folder, a run of the trainer or a .gguf file
out: runs/a-int4
scheme: {kind: int4_weight, group: 64, method: gptq}
data: {train: [python-docs], sequence: 512}    # calibration; the held-out part measures perplexity
budget: 0.02                                   # perplexity may grow by 2%
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from lezero.compress.quantize import (
    Fp8,
    Int4Weight,
    Int8Weight,
    Int8WeightActivation,
    Nf4,
    Scheme,
)
from lezero.compress.quantize.exported import why_not_exported
from lezero.compress.quantize.methods import methods
from lezero.core.config import Config, PathText, read_yaml, set_path
from lezero.data.config import DataConfig

SCHEMES: dict[str, type[Scheme]] = {
    "int8_weight": Int8Weight,
    "int8_weight_activation": Int8WeightActivation,
    "int4_weight": Int4Weight,
    "fp8": Fp8,
    "nf4": Nf4,
}


class CompressConfig(Config):
    """Which model becomes smaller, how, and what is measured on the way."""

    model: PathText = Field(min_length=1)
    """A Hugging Face folder, a run of the trainer or a .gguf file."""
    out: PathText = Field(min_length=1)
    """The folder that is written."""
    scheme: SerializeAsAny[Scheme]
    """kind (int8_weight, int8_weight_activation, int4_weight, fp8, nf4), and that one's fields."""
    data: DataConfig = DataConfig(train=("python-docs",))
    """Text for calibration; its held-out part measures perplexity. Tokens are the model's own."""
    calibration_rows: int = Field(default=64, ge=0)
    """Full rows of training text, joined where it is short, that calibrate, or what there is; 0:
    none."""
    validation_rows: int = Field(default=32, ge=1)
    """Held-out rows that measure perplexity."""
    batch: int = Field(default=8, ge=1)
    """Rows of one batch: what speed is measured on."""
    objective: Literal["speed", "size"] = "speed"
    """speed: layers that are not faster here stay; size: all become smaller."""
    budget: float | None = Field(default=None, ge=0)
    """How much perplexity may grow, as a fraction; more is an error and nothing is written."""
    filter: tuple[str, ...] | None = None
    """Patterns of layer names that are taken ("*.mlp.*") or, after a "!", left out ("!*.dt_proj");
    all are taken without it."""
    layout: Literal["lezero", "compressed-tensors"] = "lezero"
    """lezero: what LeZero loads, bit for bit; compressed-tensors: for other servers."""

    @field_validator("filter", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        value = (value,) if isinstance(value, str) else value
        if value is not None and not value:
            raise ValueError("no pattern in it; leave it out, and all layers are taken")
        return value

    @field_validator("scheme", mode="before")
    @classmethod
    def _of_kind(cls, value: Any) -> Any:
        if isinstance(value, Scheme):
            return value
        given = {"kind": value} if isinstance(value, str) else value
        found = given.get("kind") if isinstance(given, Mapping) else given
        if not isinstance(found, str) or found not in SCHEMES or not isinstance(given, Mapping):
            raise ValueError(f"kind {found!r} is none of {', '.join(SCHEMES)}")
        fields = {str(key): item for key, item in given.items() if key != "kind"}
        return SCHEMES[found](**fields)

    @model_validator(mode="after")
    def _layout_holds(self) -> Self:
        why = why_not_exported(self.scheme) if self.layout == "compressed-tensors" else ""
        if why:
            raise ValueError(f"layout 'compressed-tensors': {why}")
        return self

    @model_validator(mode="after")
    def _data_where_needed(self) -> Self:
        method = self.scheme.recipe().method
        if not self.calibration_rows and methods.get(method).needs_data:
            raise ValueError(
                f"calibration_rows: got 0, but method '{method}' needs calibration data; give "
                "some rows, or take the method 'nearest' or 'hqq'"
            )
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> Self:
        """Reads a YAML file and applies `a.b=value` overrides; `ConfigError` explains problems."""
        data = read_yaml(str(path))
        for assignment in overrides or []:
            if isinstance(data.get("scheme"), str):  # the short form, which overrides go into
                data["scheme"] = {"kind": data["scheme"]}
            set_path(data, assignment)
        return cls.parse(data, str(path))
