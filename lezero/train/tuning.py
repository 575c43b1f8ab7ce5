"""Finds the fastest form of a training step, in steps of the run itself.

[Note: no pass but the run's]
A pass that only measures is one that nobody asked for: what it changes beyond the model's buffers
(another network that the loss calls, a counter, a state that a recurrent model keeps, an optimizer
in a gradient's hook, a collective among the ranks) would stay, and other numbers be trained. So
steps of the run are taken now in one form and now in another, which compute the same up to
rounding, and their times are compared; rank 0's count. Batches may differ in length, so a time is
taken as that of a step as large as the first, by the elements of their tensors. What was timed so
far is part of a checkpoint: a resumed run takes its next step in the form that the interrupted one
would have taken, unless it is of another length now, and begins the trial anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lezero.comm import watch
from lezero.core import groups
from lezero.core.decisions import Decisions
from lezero.core.errors import LeZeroError
from lezero.core.log import logger
from lezero.ops.attention import available, kernel_name
from lezero.parallel.zero import sharding_of
from lezero.train.compile_cache import drop_damaged
from lezero.train.loss import Batch, LossFunction, size_of
from lezero.train.precision import Precision
from lezero.train.speed import (
    Forms,
    can_compile_blocks,
    check_compiler,
    compiler_problem,
    on_any_rank,
    strip,
)

log = logger("train")

_HORIZON = 10_000
_ROUNDS = 3
_WORTH_A_TRIAL = 200
_TYPICAL_GAIN = 0.35
_TYPICAL_COMPILE_S = 40.0

Trial = Generator[Forms, float, str]
"""Yields the form of each next step, is sent the seconds that it took, returns what it chose."""


class FormFailedError(Exception):
    """Thrown into a trial: the form that it asked for does not run."""


@dataclass(frozen=True)
class _Duel:
    """Seconds of a step in the form that there was and in another; `first`: that one's first."""

    base: float
    other: float
    first: float


class Tuner:
    """Knows the form of the next step. The engine tells what a step took (`note`) or that it
    `failed`.

    taken: the seconds of what the trial has timed so far; None comes before those of a step whose
    form failed. size: elements of the first step's tensors, which they are of; 0: there was none
    yet.
    ahead: how many steps the run still took when the trial began; None: there is none under way.
    mended: what `failed` last was a damaged file, which is gone: the form can run once more.

    [Note: a chosen form that fails later]
    A loss may do in its thousandth step what it has not done before, such as a gradient of a
    gradient, which compiled code cannot take. Where nobody asked for the form, the step is then
    taken plainly. If that works, it was the form's fault, which is left for good; if not, the error
    is the user's own. On one rank alone: others would not know, and go on in the form.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        decisions: Decisions,
        *,
        compile: str,
        attention: str,
        accumulate: int,
    ) -> None:
        self.model, self.loss, self.decisions = model, loss, decisions
        self.accumulate, self.taken = accumulate, list[float | None]()
        self._asked, self._asked_attention = compile, attention
        self._form: Forms | None = None
        strip(model)
        self.forget([], None, 0)

    def forget(self, taken: list[float | None], ahead: int | None, size: int) -> None:
        """The form is found anew, from decisions that are replayed or else from what a loaded run
        has `taken` of a trial that began so many steps `ahead` of its end with one of this size."""
        if self._form is not None:
            self._form.off()
        self.taken, self.ahead, self.size, self._form = taken, ahead, size, None
        self._made: dict[tuple[str, str], Forms] = {}
        self._trial: Generator[Forms, float, Forms] | None = None
        self._suspect: Forms | None = None
        self._base: Forms | None = None
        self._failure = self._blamed = ""
        self.mended = False

    @property
    def begun(self) -> bool:
        return self._form is not None

    @property
    def form(self) -> Forms:
        """The form of the next step."""
        assert self._form is not None, "not begun"
        return self._form

    def begin(self, precision: Precision, steps: int | None) -> Forms:
        """The form of the next step; the first time, what there is to try is found out. steps: how
        many the run still takes (None: 10,000)."""
        if self._form is None:
            if self.ahead is None:
                self.ahead = _HORIZON if steps is None else max(1, steps)
            self.precision, self.steps = precision, self.ahead
            self._trial, before, self.taken = self._choose(), self.taken, []
            self._to(next)
            for seconds in before:
                if seconds is not None:
                    self._take(seconds)
                elif self._trial is not None and self._form is self._suspect:
                    self._blame("failed before the resume")
        self.form.on()  # again, since another engine may have taken a step on this model
        return self.form

    @property
    def trying(self) -> bool:
        """Whether nothing is decided yet."""
        return self._trial is not None

    def note(self, seconds: float, batches: Sequence[Batch] = ()) -> None:
        """After a step of these batches that was taken in `form`; every rank calls it together.

        A form on trial that failed on any of them has failed for all."""
        if self._suspect is not None and (failure := on_any_rank(self._blamed)):
            if groups.is_main():
                name = self._suspect.name
                what = f"compile: '{name}'" if name != "eager" else "attention: LeZero's kernel"
                log.warning("%s failed on trial and is left out: %s", what, failure)
            self._blame(failure)
        size = size_of(batches)
        self.size = self.size or size
        self._take(seconds * self.size / size)

    def _take(self, seconds: float) -> None:
        if self._trial is not None:
            self.taken.append(seconds)
            self._to(lambda trial: trial.send(seconds))

    def failed(self, error: Exception) -> bool:
        """Whether an error of the passes may be the form's, so that they can be run `instead` in
        another: of one on trial, or of one that was chosen and now fails."""
        if isinstance(error, LeZeroError):
            return False
        dropped = drop_damaged(error)
        self.mended = dropped and (self.trying or groups.world_size() == 1)
        if self.mended:  # other ranks, in a form that was chosen, would not know
            return True
        self._failure = _said(error)
        if self._trial is None:  # [Note: a chosen form that fails later]
            compiled = self.form.name != "eager"
            return compiled and self._asked == "auto" and groups.world_size() == 1
        if self._form is not self._suspect:
            return False
        assert self._form is not None
        assert self._base is not None
        self._blamed = self._failure
        self._form.off()
        self._form = self._base  # the other ranks, still in the suspect, hear of it in `note`
        self._form.on()
        return True

    def _blame(self, failure: str) -> None:
        """The trial goes on without the form that it asked for."""
        self.taken.append(None)
        self._blamed = ""
        self._to(lambda trial: trial.throw(FormFailedError(failure)))

    def instead(
        self, failed: Forms, passes: Callable[[Forms], torch.Tensor], step: int
    ) -> torch.Tensor:
        """The passes of this step, whose form has `failed`, in another."""
        if self.form is not failed:  # the trial went on
            return passes(self.form)
        eager = self._in("eager", failed.attention)
        failed.off()
        try:
            found = passes(eager)
        except BaseException:
            failed.on()
            raise
        self._form, self._made = eager, {}
        self._record_failure(failed.name, step)
        return found

    def _record_failure(self, name: str, step: int) -> None:
        """That a chosen form is left for good, also after a resume."""
        old = self.decisions.records["compile"]
        figures = {**old.candidates, name: {old.unit: None, "failed": self._failure}}
        reason = f"'{name}', which was chosen, failed in step {step}"
        self.decisions.record(
            "compile", "eager", figures, reason, unit=old.unit, fact=True, step=step - 1
        )
        log.warning(
            "compile: '%s' failed in step %d, which was taken plainly, as all others will be: %s",
            name, step, self._failure,
        )  # fmt: skip

    def _to(self, step: Callable[[Generator[Forms, float, Forms]], Forms]) -> None:
        assert self._trial is not None
        if self._form is not None:
            self._form.off()
        try:
            with watch.busy("finds the form of its steps"):  # which may build a kernel
                self._form = step(self._trial)
        except StopIteration as end:
            self._form, self._trial, self.ahead = end.value, None, None
            self._made = {}
        except BaseException:  # an interrupt, say, which has ended the trial: `begin` starts anew
            self._form = self._trial = self._suspect = None
            self.taken.clear()
            raise
        self.form.on()

    def _in(self, name: str, attention: str) -> Forms:
        key = name, attention
        if key not in self._made:
            self._made[key] = Forms(name, attention, self.model, self.loss)
        return self._made[key]

    # the trial -------------------------------------------------------------------------------

    def _choose(self) -> Generator[Forms, float, Forms]:
        override = {"auto": None, "off": "eager"}.get(self._asked, self._asked)
        check_compiler(override, self.precision.place, self.decisions)
        attention = yield from self._attention()
        name = yield from self._compile(override, attention)
        return self._in(name, attention)

    def _attention(self) -> Trial:
        """Whose attention kernel runs: measured on the model itself, in eager form."""
        topic, record = "attention", self.decisions.record
        if self._asked_attention != "auto":
            return record(topic, self._asked_attention, overridden=True, reason="asked for")
        micros = self.steps * self.accumulate
        if micros < _WORTH_A_TRIAL:
            reason = f"not tried: {micros} micro-batches are too few to tell"
            return record(topic, "torch", reason=reason)
        why_not = on_any_rank(self._no_kernel())
        if why_not:
            return record(topic, "torch", reason=why_not, fact=True)
        if topic in self.decisions.replay:
            return record(topic, "torch")
        warm = yield self._in("eager", "torch")
        found = yield from self._duel(self._in("eager", "torch"), self._in("eager", "lezero"))
        figures: dict[str, float | str] = {"torch": warm, "lezero": str(found)}
        if isinstance(found, _Duel):
            figures = {"torch": found.base, "lezero": found.other}
        return self._decide(
            topic, figures, unit="s a step", why="steps of the run timed with each kernel in turns",
            keep="torch", margin=0.01,
        )  # fmt: skip

    def _no_kernel(self) -> str:
        """Why LeZero's attention cannot run here, where it cannot. One that a resumed run had stays
        in another precision too, which serves it as torch's: the run may switch back to bf16."""
        cpu = self.precision.place.type == "cpu"
        old = self.decisions.replay.get("attention")
        narrow = self.precision.name == "bf16" or old is not None
        if not narrow or not cpu or not kernel_name():
            return "LeZero's kernel computes in bf16 on CPUs with AVX512-BF16"
        wanted = old is None or old.chosen == "lezero"
        return (
            "the kernel could not be built; the log says why" if wanted and not available() else ""
        )

    def _compile(self, override: str | None, attention: str) -> Trial:
        """Eager, the blocks compiled or the whole step: the shortest run, compilation included."""
        topic, eager = "compile", self._in("eager", attention)
        others = ["blocks"] if can_compile_blocks(self.model, self._asked) else []
        if groups.world_size() == 1 and sharding_of(self.model) is None:
            others.append("step")
        old = self.decisions.replay.get(topic)
        if override is not None or (old is not None and old.chosen in ("eager", *others)):
            known: dict[str, float | str] = dict.fromkeys(("eager", *others), 0.0)
            return self._decide(topic, known, override=override)
        each: float = groups.broadcast_object((yield eager))
        if not self._too_short(each):
            times = []
            for _ in range(_ROUNDS):
                times.append((yield eager))
            each = groups.broadcast_object(statistics.median(times))
        figures: dict[str, float | str] = {"eager": self.steps * each}
        why_not = self._too_short(each) or (self._no_compiler() if others else "")
        for name in others:
            figures[name] = why_not or (yield from self._run_in(name, eager, each))
        return self._decide(
            topic, figures, unit="predicted s for the run",
            why=f"steps of the run timed, compilation added, {self.steps} steps ahead",
            keep="eager", margin=0.02,
        )  # fmt: skip

    def _too_short(self, each: float) -> str:
        """Why the run is too short to try to compile, where it is."""
        if self.steps * each * _TYPICAL_GAIN >= _TYPICAL_COMPILE_S:
            return ""
        return (
            f"not tried: the run takes about {self.steps * each:.0f} s, too short to earn "
            "compilation back"
        )

    def _no_compiler(self) -> str:
        """Why torch can compile nothing here, where it cannot."""
        return on_any_rank(compiler_problem(self.precision.place))

    def _run_in(
        self, name: str, eager: Forms, eager_s: float
    ) -> Generator[Forms, float, float | str]:
        """Predicted seconds of the run in this form, or why it has none."""
        if groups.is_main():
            log.info(
                "compile: tries '%s' in the next steps, of which the first can take a minute; "
                "compile='off' leaves it out", name,
            )  # fmt: skip
        found = yield from self._duel(eager, self._in(name, eager.attention))
        if isinstance(found, str):
            return found
        each = found.other * eager_s / found.base  # the machine's speed moves
        return max(0.0, found.first - found.other) + self.steps * each

    def _duel(self, base: Forms, other: Forms) -> Generator[Forms, float, _Duel | str]:
        """Steps in the two forms in turns, or why the other one does not run."""
        bases, others = [], []
        try:
            for _ in range(1 + _ROUNDS):
                self._suspect, self._base = other, base
                others.append((yield other))
                self._suspect = None
                bases.append((yield base))
        except FormFailedError as failure:
            self._suspect = None
            yield base  # for the step that failed; its time has the failed passes in it
            return str(failure)
        first = others.pop(0)
        return _Duel(statistics.median(bases), statistics.median(others), first)

    def _decide(
        self,
        topic: str,
        figures: Mapping[str, float | str],
        *,
        override: str | None = None,
        unit: str = "s",
        why: str = "",
        keep: str | None = None,
        margin: float = 0.0,
    ) -> str:
        """Chooses among figures, of which a text says why there is none."""

        def known(figure: float | str) -> Callable[[], float]:
            def give() -> float:
                if isinstance(figure, str):
                    raise RuntimeError(figure)
                return figure

            return give

        self.taken.clear()
        candidates = {name: known(figure) for name, figure in figures.items()}
        return self.decisions.choose(
            topic, candidates, override=override, unit=unit, why=why, keep=keep, margin=margin
        )


def _said(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    error = getattr(error, "inner_exception", error)  # of torch's "backend='inductor' raised:"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
