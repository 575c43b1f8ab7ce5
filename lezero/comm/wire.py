"""What a wire is: codec × feedback × topology, written by the user."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lezero.comm import legal
from lezero.core.config import Config
from lezero.core.errors import ConfigError, Problem

AUTO = "auto"
_NAMES = ("fp16", "bf16", "int8", "int4", "sign", "2:4-bf16", "2:4-int8", "2:4-int4")
"""For editors, which offer them; `codec` knows what there is."""


class Wire(Config):
    """How ranks exchange tensors. The default moves them as they are, by the shortest way.

    Every rank gives the same. docs/wires.md tells which combinations are allowed and why.
    """

    codec: str = Field("none", examples=["none", AUTO, *_NAMES, "topk:0.01"])
    """How gradients are encoded: none, a codec's name such as "int4" or "int8:128", or auto: what
    makes this run's steps shortest within `budget`, by measurement; none where nothing pays."""
    budget: float = Field(0.15, gt=0)
    """With codec auto: the largest error allowed, as what a codec still owes of a gradient,
    ||e|| / ||g|| (0.15 admits int8 and int4 with feedback; docs/wires.md)."""
    gather: str = Field("none", examples=["none", "fp16", "bf16", "int8", "int4"])
    """How parameters are encoded when they are gathered: none, fp16, bf16, int8 or int4."""
    feedback: Literal["none", "worker", "both"] = "none"
    """Whose encoding error is kept and added to the next tensor: nobody's, each sender's, or the
    sender's and that of the second encoding of an all-reduce."""
    feedback_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """How kept errors are stored."""
    topology: Literal["auto", "flat", "hierarchical", "shared"] = "auto"
    """The way: every rank with every rank (flat), inside the hosts first (hierarchical), or through
    memory that the ranks of one host share (shared). auto: the shortest that the hosts allow."""

    @field_validator("codec", "gather")
    @classmethod
    def _known(cls, name: Any) -> Any:
        from lezero.comm.codec import codec  # torch, which importing a config does not need

        return name if name == AUTO else codec(name).name

    @model_validator(mode="after")
    def _allowed(self) -> Self:
        found = legal.problems(legal.Case(self.codec, self.gather, self.feedback, self.topology))
        found += self._unheeded()
        if found:
            raise ConfigError("; ".join(map(str, found)), tuple(found))
        return self

    def _unheeded(self) -> list[Problem]:
        """Fields that would change nothing, so that whoever set them hopes in vain."""
        found = []
        if self.codec != AUTO and self.budget != type(self).model_fields["budget"].default:
            reason = f"got {self.budget}, which codec auto alone heeds; leave it out"
            found.append(Problem(("budget",), self.budget, f"{reason}, or set codec: auto"))
        kept = self.feedback_dtype
        if self.feedback == "none" and self.codec != AUTO and kept != "fp32":
            reason = f"got {kept!r}, but no errors are kept; leave it out, or set feedback: worker"
            found.append(Problem(("feedback_dtype",), kept, reason))
        return found
