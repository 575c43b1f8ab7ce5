"""What a wire is: codec × feedback × topology, written by the user."""

from __future__ import annotations

from typing import Literal

from lezero.core.config import Config


class Wire(Config):
    """How ranks exchange tensors. The default moves them as they are, by the shortest way.

    Every rank gives the same. docs/wires.md tells which combinations are allowed and why.
    """

    codec: str = "none"
    """How gradients are encoded: none, or a codec's name such as "int4" or "int8:128"."""
    gather: str = "none"
    """How parameters are encoded when they are gathered: none, fp16, bf16, int8 or int4."""
    feedback: Literal["none", "worker", "both"] = "none"
    """Whose encoding error is kept and added to the next tensor: nobody's, each sender's, or the
    sender's and that of the second encoding of an all-reduce."""
    feedback_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """How kept errors are stored."""
    topology: Literal["auto", "flat", "hierarchical", "shared"] = "auto"
    """The way: every rank with every rank (flat), inside the hosts first (hierarchical), or through
    memory that the ranks of one host share (shared). auto: the shortest that the hosts allow."""
