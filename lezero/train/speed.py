"""What makes a step faster: the forms that it can run in, and the pool of host memory.

Which form a run takes is found by `tuning.py`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lezero.core import groups
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.core.facts import memory_limit
from lezero.core.log import logger
from lezero.memory import HostPool
from lezero.ops.attention import FastAttention, available
from lezero.ops.attention.mode import backward
from lezero.parallel.zero import sharding_of
from lezero.train.compile_cache import drop_damaged
from lezero.train.loss import Batch, LossFunction

log = logger("train")

FORMS = ("eager", "blocks", "step")
ATTENTIONS = ("torch", "lezero")


_DRAWS: dict[str, Any] = {"fallback_random": True}
"""Compiled code draws as plain code does (docs/training.md has the exceptions): by its own numbers,
dropout would drop others."""


class _Compiled:
    """A function as compiled code, which sees the hooks that modules are given later.

    By default torch makes no guard for those, and compiled code would go on without them. Guards
    are made in whichever call compiles, so that each says that they are wanted.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain, self._fast = function, torch.compile(function, options=_DRAWS)
        self._guard_hooks = torch._dynamo.config._make_closure_patcher(
            skip_nnmodule_hook_guards=False
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a program around it, which says itself what it guards
            return self._plain(*args, **kwargs)
        undo = self._guard_hooks()
        try:
            return self._fast(*args, **kwargs)
        finally:
            undo()


class Forms:
    """A form in which the model runs. `loss` and `backward` are what the engine calls, between `on`
    and `off`.

    name: "eager", "blocks" or "step". attention: "torch", or "lezero" for the kernel of
    `lezero.ops.attention` wherever it fits. Blocks that the user compiled stay so in every form;
    what another engine compiled does not, nor does what this form did once nobody has it any more.
    """

    def __init__(self, name: str, attention: str, model: nn.Module, loss: LossFunction) -> None:
        self.name, self.attention = name, attention
        self._inner = _Compiled(loss) if name == "step" else loss
        self._mode = FastAttention() if attention == "lezero" else None
        self._blocks = [
            (block, _Compiled(block._call_impl) if name == "blocks" else None)
            for block in _uncompiled(model)
        ]
        held = [(weakref.ref(b), weakref.ref(c)) for b, c in self._blocks if c is not None]
        weakref.finalize(self, _take_off, held).atexit = False
        self._new = name != "eager"

    @property
    def compiles(self) -> bool:
        """Whether the first pass of a compiled form is still to come."""
        return self._new

    def on(self) -> None:
        for block, compiled in self._blocks:
            if block._compiled_call_impl is not compiled and _is_uncompiled(block):
                block._compiled_call_impl = compiled

    def off(self) -> None:
        for block, compiled in self._blocks:
            if block._compiled_call_impl is compiled:
                block._compiled_call_impl = None

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with self._mode or contextlib.nullcontext():
            return self._inner(model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        """With the same attention, since activations may be recomputed there."""
        if self._mode is None:
            loss.backward()
        else:
            with self._mode:
                backward(loss)
        self._new = False


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that a model stacks: members of the longest `ModuleList` or `Sequential` of one
    class; compiled one by one they share their code. Empty when nothing repeats."""
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            members = list(module)
            if len(members) > max(1, len(best)) and len({type(m) for m in members}) == 1:
                best = members
    return best


def strip(model: nn.Module) -> None:
    """Takes off what an earlier engine, which may still be there, has compiled of the model."""
    for module in model.modules():
        if isinstance(module._compiled_call_impl, _Compiled):
            module._compiled_call_impl = None


def _take_off(held: list[tuple[weakref.ref[nn.Module], weakref.ref[_Compiled]]]) -> None:
    """Of a form that is gone: another engine's may be on by now, which stays."""
    for block, compiled in ((block(), compiled()) for block, compiled in held):
        if block is not None and block._compiled_call_impl is compiled is not None:
            block._compiled_call_impl = None


def _uncompiled(model: nn.Module) -> list[nn.Module]:
    return [block for block in repeated_blocks(model) if _is_uncompiled(block)]


def _is_uncompiled(block: nn.Module) -> bool:
    """Whether the user has not compiled it."""
    there = block._compiled_call_impl
    return there is None or isinstance(there, _Compiled)


def can_compile_blocks(model: nn.Module, asked: str) -> bool:
    """Whether there are blocks to compile, or the user asks for those that are compiled already."""
    return bool(_uncompiled(model) or (asked == "blocks" and repeated_blocks(model)))


def check_asked(model: nn.Module, compile: str, attention: str) -> None:
    """Raises `ConfigError` for a form or an attention kernel that there is not, or not here."""
    if compile not in ("auto", "off", *FORMS):
        allowed = ", ".join(("auto", "off", *FORMS[1:]))
        raise ConfigError(f"compile: got {compile!r}, allowed is {allowed}")
    if compile == "blocks" and not repeated_blocks(model):
        raise ConfigError(
            "compile: got 'blocks', but the model has no ModuleList or Sequential of layers of one "
            "class; use auto, off or step"
        )
    if compile == "step" and (groups.world_size() > 1 or sharding_of(model) is not None):
        raise ConfigError(
            "compile: got 'step', which is for one rank and a model that is not sharded; use auto, "
            "off or blocks"
        )
    if attention not in ("auto", *ATTENTIONS):
        allowed = ", ".join(("auto", *ATTENTIONS))
        raise ConfigError(f"attention: got {attention!r}, allowed is {allowed}")
    if attention == "lezero" and not available():
        raise ConfigError(
            "attention: got 'lezero', whose kernel needs a CPU with AVX512-BF16 and a C++ "
            "compiler; `lz doctor` says what is missing. Use auto or torch"
        )


def check_compiler(override: str | None, place: torch.device, decisions: Decisions) -> None:
    """Sees that a form which nobody is going to try can be compiled here.

    One that the user asked for is a `ConfigError` if not; one that a resumed run had is dropped.
    """
    old = decisions.replay.get("compile")
    name = override or (old.chosen if old is not None else "eager")
    if name == "eager":
        return
    problem = on_any_rank(compiler_problem(place))
    if not problem:
        return
    if override is not None:
        raise ConfigError(
            f"compile: got '{name}', but torch cannot compile here ({problem}); use off, or "
            "install what is missing (`lz doctor`)"
        )
    if groups.is_main():
        log.warning("compile was '%s', but torch cannot compile here (%s)", name, problem)
    del decisions.replay["compile"]


def on_any_rank(problem: str) -> str:
    """The first rank's problem, where one has any: machines differ, and all ranks take one form.
    Every rank calls it together."""
    found = groups.gather_objects(problem)
    named = (f"{x} (rank {rank})" if len(found) > 1 else x for rank, x in enumerate(found) if x)
    return next(named, "")


def compiler_problem(place: torch.device) -> str:
    """Why torch can compile nothing here, or nothing."""
    try:
        torch.compile(_one_more)(torch.ones(2, device=place))
    except Exception as error:
        if drop_damaged(error):
            return compiler_problem(place)
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return ""


def _one_more(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def host_pool(decisions: Decisions, owner: object) -> HostPool | None:
    """The host memory pool, switched on where the platform has it, until `owner` is freed; a
    recorded decision."""
    pool = HostPool(memory_limit() // groups.ranks_here())
    on = pool.enable()
    weakref.finalize(owner, pool.disable).atexit = False  # a process that ends gives all back
    decisions.record(
        "host memory pool",
        "on" if on else "off",
        reason=f"freed blocks are kept, up to {pool.bound / 2**30:.1f} GiB"
        if on
        else "LEZERO_POOL=0, or no glibc",
        fact=True,
    )
    return pool if on else None
