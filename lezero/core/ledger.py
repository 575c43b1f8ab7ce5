"""The ledger of a model: which verbs changed it, in order, so that a later one can refuse.

It is an attribute of the root module, travels with it (also through `copy.deepcopy`), and holds
names only: verbs never read each other's settings from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lezero.core.errors import OrderError

if TYPE_CHECKING:
    from torch import nn

_ATTRIBUTE = "_lezero_ledger"


def applied(model: nn.Module) -> tuple[str, ...]:
    """Names of the verbs applied to `model` so far, oldest first."""
    return tuple(model.__dict__.get(_ATTRIBUTE, ()))


def record(model: nn.Module, verb: str) -> None:
    """Notes that `verb` was applied; call it when the verb has succeeded."""
    model.__dict__[_ATTRIBUTE] = [*applied(model), verb]


def refuse_again(model: nn.Module, verb: str, remedy: str) -> None:
    """Raises `OrderError` when `verb` was applied to `model`, or to a part of it, before."""
    for name, module in model.named_modules():
        if verb in applied(module):
            where = f"its part '{name}'" if name else "this model"
            raise OrderError(f"{verb}: {where} went through {verb} already; {remedy}")


def forget(model: nn.Module, verb: str) -> None:
    """Takes `verb` off the ledger; for the verb that undoes it."""
    left = [name for name in applied(model) if name != verb]
    if left:
        model.__dict__[_ATTRIBUTE] = left
    else:
        model.__dict__.pop(_ATTRIBUTE, None)
