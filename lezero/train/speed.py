"""What makes a step faster, taken only where it was measured to: kernels, compiling, the pool.

On the first batch, rank 0 times forward and backward of one micro-batch in each form, eager first.
All ranks of a sharded model time together, since its passes exchange something; rank 0's figures
count.
The figure compared is the predicted time of the whole run, compilation included, so a short run
stays eager. Nothing of the trial remains: batch, gradients, buffers and generators are as before.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lezero.core import groups
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.core.facts import memory_limit
from lezero.core.log import logger
from lezero.memory import HostPool
from lezero.nn.buffers import BufferSnapshot
from lezero.nn.frozen_writes import Named, frozen_writes
from lezero.ops.attention import FastAttention, available, kernel_name
from lezero.ops.attention.mode import backward
from lezero.parallel.zero import sharding_of
from lezero.train.gradients import wires_untouched
from lezero.train.loss import Batch, LossFunction, private, scalar
from lezero.train.precision import Precision
from lezero.train.randomness import seeded

log = logger("train")

FORMS = ("eager", "blocks", "step")
ATTENTIONS = ("torch", "lezero")
_HORIZON = 10_000
_ROUNDS = 3
_WORTH_A_TRIAL = 200
_TYPICAL_GAIN = 0.35
_TYPICAL_COMPILE_S = 40.0


class Forms:
    """The form in which the model runs. `loss` and `backward` are what the engine calls.

    name: "eager", "blocks" or "step". attention: "torch", or "lezero" for the kernel of
    `lezero.ops.attention` wherever it fits. frozen: parameters without a gradient that the forward
    pass writes all the same. Blocks that the user compiled stay so in every form.
    """

    def __init__(
        self,
        name: str,
        attention: str,
        model: nn.Module,
        loss: LossFunction,
        frozen: Sequence[Named] = (),
    ) -> None:
        self.name, self.model, self.frozen = name, model, frozen
        self._inner = torch.compile(loss) if name == "step" else loss
        self._mode = FastAttention() if attention == "lezero" else None
        self._blocks = _uncompiled(model) if name == "blocks" else []
        for block in self._blocks:
            block.compile()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with self._mode or contextlib.nullcontext():
            return self._inner(model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        """With the same attention, since activations may be recomputed there."""
        if self._mode is None:
            loss.backward()
            return
        with self._mode:
            backward(loss)

    def undo(self) -> None:
        for block in self._blocks:
            block._compiled_call_impl = None
        self._blocks = []


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


def _uncompiled(model: nn.Module) -> list[nn.Module]:
    return [block for block in repeated_blocks(model) if block._compiled_call_impl is None]


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


def choose(
    model: nn.Module,
    loss: LossFunction,
    micro: Batch,
    precision: Precision,
    decisions: Decisions,
    *,
    asked: str,
    asked_attention: str,
    steps: int | None,
    accumulate: int,
    seed: int,
) -> Forms:
    """The form to run in. `check_asked` has seen what the user asked for."""
    override = {"auto": None, "off": "eager"}.get(asked, asked)
    _check_compiler(override, precision.place, decisions)
    trial = _Trial(model, loss, micro, precision, (steps or _HORIZON) * accumulate, seed)
    attention = _choose_attention(trial, precision, decisions, asked_attention)
    trial.attention = attention
    sharded = sharding_of(model) is not None
    candidates: dict[str, Callable[[], float]] = {"eager": lambda: trial.run_seconds("eager")}
    if _uncompiled(model) or (asked == "blocks" and repeated_blocks(model)):
        candidates["blocks"] = lambda: trial.run_seconds("blocks")
    if groups.world_size() == 1 and not sharded:
        candidates["step"] = lambda: trial.run_seconds("step")
    chosen = decisions.choose(
        "compile",
        trial.together("compile", candidates, override, decisions),
        override=override,
        unit="predicted s for the run",
        why=f"forward and backward timed, compilation added, {trial.steps} micro-batches ahead",
        keep="eager",
        margin=0.02,
    )
    return Forms(chosen, attention, model, loss, trial.frozen)


def _check_compiler(override: str | None, place: torch.device, decisions: Decisions) -> None:
    """Sees that a form which nobody is going to try can be compiled here.

    One that the user asked for is a `ConfigError` if not; one that a resumed run had is dropped.
    """
    old = decisions.replay.get("compile")
    name = override or (old.chosen if old is not None else "eager")
    if name == "eager":
        return
    problem = groups.broadcast_object(_compiler_problem(place) if groups.is_main() else "")
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


def _compiler_problem(place: torch.device) -> str:
    """Why torch can compile nothing here, or nothing."""
    try:
        torch.compile(_one_more)(torch.ones(2, device=place))
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return ""


def _one_more(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _choose_attention(trial: _Trial, precision: Precision, decisions: Decisions, asked: str) -> str:
    """Whose attention kernel runs: measured on the model itself, in eager form."""
    if asked != "auto":
        return decisions.record("attention", asked, overridden=True, reason="asked for")
    if trial.steps < _WORTH_A_TRIAL:
        reason = f"not tried: {trial.steps} micro-batches are too few to earn the trial back"
        return decisions.record("attention", "torch", reason=reason)
    if precision.name != "bf16" or precision.place.type != "cpu" or not kernel_name():
        reason = "LeZero's kernel computes in bf16 on CPUs with AVX512-BF16"
        return decisions.record("attention", "torch", reason=reason, fact=True)
    candidates: dict[str, Callable[[], float]] = {
        "torch": lambda: trial.step_seconds("torch"),
        "lezero": lambda: trial.step_seconds("lezero"),
    }
    return decisions.choose(
        "attention",
        trial.together("attention", candidates, None, decisions),
        unit="s a micro-batch",
        why="forward and backward of the model timed with each kernel",
        keep="torch",
        margin=0.01,
    )


class _Trial:
    """Times one micro-batch in a form, leaving nothing behind."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        micro: Batch,
        precision: Precision,
        steps: int,
        seed: int,
    ) -> None:
        self.model, self.loss, self.micro = model, loss, micro
        self.precision, self.steps, self.seed = precision, steps, seed
        self.attention = "torch"
        self._eager: float | None = None
        self._broken = False
        self.frozen: list[Named] = []
        self.frozen = self._frozen_writes()

    def together(
        self,
        topic: str,
        candidates: dict[str, Callable[[], float]],
        override: str | None,
        decisions: Decisions,
    ) -> dict[str, Callable[[], float]]:
        """The candidates; of a sharded model measured by every rank already."""
        decided = override is not None or topic in decisions.replay
        if sharding_of(self.model) is None or groups.world_size() == 1 or decided:
            return candidates
        return {name: _measured(measure) for name, measure in candidates.items()}

    def run_seconds(self, name: str) -> float:
        """Predicted seconds of all micro-batches in this form, its compilation included."""
        if name != "eager" and self._eager is not None:
            saved = self.steps * self._eager * _TYPICAL_GAIN
            if saved < _TYPICAL_COMPILE_S:
                raise RuntimeError(
                    f"not tried: the run takes about {self.steps * self._eager:.0f} s, too short "
                    "to earn compilation back"
                )
        if self._broken:
            raise RuntimeError("not tried: the model fails as it is")
        if name != "eager" and groups.is_main():
            log.info(
                "compile: tries '%s' before the first step, which can take a minute; compile='off' "
                "leaves it out",
                name,
            )
        try:
            first, each = self._timed(Forms(name, self.attention, self.model, self.loss))
        except Exception as error:  # for want of memory another form may still run
            self._broken = name == "eager" and not isinstance(error, torch.OutOfMemoryError)
            raise
        if name == "eager":
            self._eager = each
        return max(0.0, first - each) + self.steps * each

    def step_seconds(self, attention: str) -> float:
        """Seconds of forward and backward in eager form with an attention kernel."""
        if attention == "lezero" and not available():
            raise RuntimeError("the kernel could not be built; the log says why")
        return self._timed(Forms("eager", attention, self.model, self.loss))[1]

    def _timed(self, form: Forms) -> tuple[float, float]:
        """Seconds of the first time and the median of the following ones."""
        try:
            with self._untouched(), wires_untouched(self.model):
                first = self._once(form)
                times = [self._once(form) for _ in range(_ROUNDS)]
        finally:
            form.undo()
        pair = [first, statistics.median(times)]
        if sharding_of(self.model) is not None:  # ranks decide alike what to try next
            pair = groups.broadcast_object(pair)
        return pair[0], pair[1]

    def _once(self, form: Forms) -> float:
        micro = private(self.micro)
        started = time.perf_counter()
        with seeded(self.seed, 0, 0):
            with self.precision.autocast():
                loss = scalar(form.loss(self.model, micro))
            form.backward(loss)
        self.model.zero_grad(set_to_none=True)
        if loss.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    def _frozen_writes(self) -> list[Named]:
        """What a forward pass writes of what is frozen, found by running one where there is any."""
        if sharding_of(self.model) is not None:
            return []

        def run() -> None:
            with self._untouched(), seeded(self.seed, 0, 0), self.precision.autocast():
                self.loss(self.model, private(self.micro))

        return frozen_writes(self.model, run)

    @contextlib.contextmanager
    def _untouched(self) -> Any:
        gradients = [(p, p.grad) for p in self.model.parameters()]
        buffers = BufferSnapshot(self.model, frozen=self.frozen)
        generators = random.getstate(), np.random.get_state()  # torch's are kept by `seeded`
        self.model.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            random.setstate(generators[0])
            np.random.set_state(generators[1])
            for parameter, gradient in gradients:
                parameter.grad = gradient
            buffers.restore()


def _measured(measure: Callable[[], float]) -> Callable[[], float]:
    """Measures now, and gives the figure or the failure when it is asked for."""
    try:
        figure = measure()
    except Exception as error:  # as `Decisions.choose` takes it
        failure = error

        def fail() -> float:
            raise failure

        return fail
    return lambda: figure


def host_pool(decisions: Decisions) -> HostPool | None:
    """The host memory pool, switched on where the platform has it; a recorded decision."""
    pool = HostPool(memory_limit() // groups.ranks_here())
    on = pool.enable()
    decisions.record(
        "host memory pool",
        "on" if on else "off",
        reason=f"freed blocks are kept, up to {pool.bound / 2**30:.1f} GiB"
        if on
        else "LEZERO_POOL=0, or no glibc",
        fact=True,
    )
    return pool if on else None
