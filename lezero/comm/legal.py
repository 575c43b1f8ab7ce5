"""Which wires are allowed, and why the others are not: one table, for code and docs/wires.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lezero.core.errors import ConfigError, Problem

_DROPPING = ("sign", "topk", "2:4")


@dataclass(frozen=True)
class Case:
    """A wire in use. "" for a topology or an operation that is not known yet."""

    codec: str
    gather: str
    feedback: str
    topology: str = ""
    operation: str = ""


@dataclass(frozen=True)
class Rule:
    """One kind of wire that is refused."""

    field: str
    what: str
    """What is refused, in words."""
    reason: str
    remedy: str
    holds: Callable[[Case], bool]


def drops(codec: str) -> bool:
    """Whether a codec leaves out much of each value, always to the same side."""
    return codec.startswith(_DROPPING)


LEGAL = (
    Rule(
        "feedback",
        "codec none with feedback",
        "nothing is lost without a codec, so there is nothing to feed back",
        "set feedback: none, or choose a codec",
        lambda c: c.codec == "none" and c.feedback != "none",
    ),
    Rule(
        "feedback",
        "codec auto with feedback",
        "auto chooses the feedback with the codec",
        "set feedback: none, or choose a codec",
        lambda c: c.codec == "auto" and c.feedback != "none",
    ),
    Rule(
        "gather",
        "gather: auto",
        "only the codec of gradients is chosen; parameters are used as they arrive",
        "set gather: none, fp16, bf16, int8 or int4",
        lambda c: c.gather == "auto",
    ),
    Rule(
        "feedback",
        "sign, topk or 2:4 without feedback",
        "most of each gradient would be lost for good, always from the same side",
        "set feedback: worker (both where gradients are all-reduced), or choose int8 or int4",
        lambda c: drops(c.codec) and c.feedback == "none",
    ),
    Rule(
        "feedback",
        "sign, topk or 2:4 with feedback worker in an all-reduce",
        "an all-reduce encodes twice, and what the second time loses would be lost for good",
        "set feedback: both",
        lambda c: drops(c.codec) and c.feedback == "worker" and c.operation == "all_reduce",
    ),
    Rule(
        "gather",
        "gather: sign, topk or 2:4",
        "parameters are used as they arrive; what is dropped is missing from the model",
        "set gather: none, fp16, bf16, int8 or int4",
        lambda c: drops(c.gather),
    ),
    Rule(
        "topology",
        "topology shared with a codec",
        "ranks read each other's memory, so fewer bytes save nothing and encoding costs time",
        "set codec: none and gather: none, or topology: auto",
        lambda c: (
            c.topology == "shared" and (c.codec not in ("none", "auto") or c.gather != "none")
        ),
    ),
)
"""Every combination that no rule holds for is allowed."""


def problems(case: Case) -> list[Problem]:
    """What is wrong with `case`: the field, its value, the reason and the remedy."""
    return [
        Problem(
            (rule.field,),
            getattr(case, rule.field),
            f"{getattr(case, rule.field)!r} is not allowed here ({rule.what}): {rule.reason}; "
            f"{rule.remedy}",
        )
        for rule in LEGAL
        if rule.holds(case)
    ]


def check(case: Case) -> None:
    """Raises `ConfigError` for a wire that is not allowed."""
    found = problems(case)
    if found:
        raise ConfigError("; ".join(f"wire.{problem}" for problem in found), tuple(found))
