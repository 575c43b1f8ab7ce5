"""The engine: one optimizer step over micro-batches and ranks, for anyone's own loop.

    engine = lz.Engine(model, optimizer, loss=lz.next_token_loss, accumulate=8)
    for batch in loader:
        result = engine.train_step(batch)

The model stays a plain module and the optimizer a plain torch optimizer. What a step does, in
order: learning rate of the step → counts of every micro-batch and rank → forward and backward of
each, weighted by its count (gradients meet across ranks in the last) → unscale → norm → skip if
anything is not finite → clip → optimizer step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lezero.comm import watch
from lezero.core import groups
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError, NumericsError, OrderError
from lezero.core.first_calls import settle_first_calls
from lezero.core.log import logger
from lezero.core.paths import expand_home
from lezero.nn.modes import evaluating
from lezero.nn.walk import drop_gradients
from lezero.optim import Schedule
from lezero.train import engine_state, speed
from lezero.train.agreement import before_step
from lezero.train.counting import Batch, Count, Counter, why_nothing
from lezero.train.engine_arguments import agree_on_arguments, check_held, check_model, check_numbers
from lezero.train.gradients import Sharded, gradients_of
from lezero.train.loss import (
    LossFunction,
    LossSum,
    check_batches,
    in_step,
    mean_loss,
    model_loss,
    private,
    rewrapped,
    scalar,
    split,
    to_device,
)
from lezero.train.moving_buffers import MovingBuffers
from lezero.train.nonfinite import find_on_all
from lezero.train.options import Options
from lezero.train.precision import Precision, resolve_plain, resolve_sharded
from lezero.train.randomness import seeded
from lezero.train.step_requests import StepRequests
from lezero.train.step_result import StepResult
from lezero.train.token_ids import check_token_ids
from lezero.train.tuning import Tuner

log = logger("train")


class Engine:
    """Trains `model` with `optimizer`, one `train_step` a batch.

    loss: `loss(model, batch) -> mean loss`; None: the model returns it (see `train/loss.py`).
    counted: what the mean is over: "tokens", "samples", "auto" or a function of the batch.
    precision: "auto", "fp32", "bf16" or "fp16". accumulate: micro-batches a step and rank.
    clip: largest gradient norm (None: no clipping). schedule and total_steps: the learning rate.
    compile: "auto" measures in the first steps whether compiling pays within `total_steps` (10,000
    if not given); "off"; "blocks"; "step". attention: whose kernel computes it: "auto" measures,
    "torch" or "lezero". pool: keep host memory blocks between steps.
    max_skipped: non-finite steps in a row before `NumericsError` ends the run.
    Every rank gives the same, and an optimizer with the same options: `DistributedError` if not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: LossFunction | None = None,
        counted: str | Count = "auto",
        precision: str = "auto",
        accumulate: int = 1,
        clip: float | None = None,
        schedule: Schedule | None = None,
        total_steps: int | None = None,
        compile: str = "auto",
        attention: str = "auto",
        pool: bool = True,
        max_skipped: int = 10,
        seed: int = 0,
        decisions: Decisions | None = None,
    ) -> None:
        check_numbers(
            accumulate=accumulate, max_skipped=max_skipped, total_steps=total_steps, seed=seed,
            clip=clip, schedule=schedule,
        )  # fmt: skip
        accumulate, max_skipped, seed = map(int, (accumulate, max_skipped, seed))  # of numpy, too
        total_steps = None if total_steps is None else int(total_steps)
        clip = None if clip is None else float(clip)
        check_model(model, optimizer)
        speed.check_asked(model, compile, attention)
        agree_on_arguments(
            model, optimizer, counted=counted if isinstance(counted, str) else "a function",
            precision=precision, accumulate=accumulate, clip=clip, schedule=schedule,
            total_steps=total_steps, compile=compile, attention=attention, max_skipped=max_skipped,
            seed=seed,
        )  # fmt: skip
        settle_first_calls()
        self.model, self.optimizer = model, optimizer
        self.count = Counter(counted, model if loss is None else None)
        self.accumulate, self.clip, self.max_skipped = accumulate, clip, max_skipped
        self.schedule, self.total_steps, self.seed = schedule, total_steps, seed
        self.decisions = decisions if decisions is not None else Decisions()
        self.place, self.asked_precision = next(model.parameters()).device, precision
        self.gradients = gradients_of(model, self.decisions, self)
        self.precision = self._precision(precision)
        pool = pool and self.place.type == "cpu"
        self.pool = speed.host_pool(self.decisions, self) if pool else None
        self.step = self.skipped_in_a_row = 0
        self.logs_skipped = True
        """Whether a step that is not finite goes to the log, besides `StepResult.skipped`."""
        self.requests = StepRequests()
        self.tuner = Tuner(
            model, loss or model_loss, self.decisions, compile=compile, attention=attention,
            accumulate=accumulate,
        )  # fmt: skip
        self._buffers = MovingBuffers(model)
        self.options = Options(model, optimizer)

    @property
    def loss(self) -> LossFunction:
        """The loss function that the engine was made with."""
        return self.tuner.loss

    def train_step(self, batch: Batch) -> StepResult:
        """One optimizer step on this rank's part of the global batch.

        Raises `ConfigError` when the batch cannot be split, nothing in it counts or it holds, on
        the host, a token outside the vocabulary; `OrderError` when the optimizer holds a
        parameter that the model does not have; `NumericsError` after `max_skipped` non-finite steps
        in a row; `DistributedError` when another rank is lost, stopped or does something else.
        """
        with watch.reporting(), self.requests.step(self._compute_in):
            return self._train_step(batch)

    def _train_step(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        if not self.model.training:
            self.model.train()
        self.options.take_new()  # here, since it may refuse
        self.gradients.begin()
        given = split(batch, self.accumulate)
        for micro in given:
            check_token_ids(self.model, micro)
        micros = [to_device(micro, self.place) for micro in given]
        self._find_shift(micros)
        counts = [self.count(micro) for micro in given]  # on the host, where that waits for nothing
        short = self.accumulate - len(given)  # what ranks exchange needs as many on each
        micros, counts = micros + micros[-1:] * short, counts + [0] * short
        total, stop = self._agree(sum(counts))
        if total == 0:
            raise ConfigError(f"nothing in this batch counts: {why_nothing(given)}")
        left = None if self.total_steps is None else self.total_steps - self.step
        form = self.tuner.begin(self.precision, left)
        lr = self._set_lr()
        self._buffers.keep()
        try:
            summed = self._passes(form, micros, counts, total)
            held = self._held()
            norm = self._gradient_norm(held)  # the one wait for an accelerator
            loss = float(summed) / total
            skipped = self._update(held, micros, loss, norm)
        except BaseException:
            self._buffers.put_back()
            self.precision.forget_step()
            raise
        self.step += 1
        if self.pool is not None:
            self.pool.after_step()
        seconds = time.perf_counter() - started
        if skipped is None:
            self.tuner.note(seconds, given)
        return StepResult(self.step, loss, norm, lr, total, seconds, skipped, stop)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float | None:
        """Mean loss over every counted unit of `batches` of all ranks, in evaluation mode.

        Ranks may hold different numbers of batches. NaN when nothing counts; None when a rank was
        asked to stop meanwhile (`request_stop`), since a part of the batches is another measure.
        Raises `ConfigError` for one batch in place of several, and when no rank has any.
        """
        with watch.reporting(), watch.busy("evaluates"):
            return self._evaluate(batches)

    def _evaluate(self, batches: Iterable[Batch]) -> float | None:
        check_batches(batches)
        sums = torch.zeros(4, dtype=torch.float64)  # loss, counted units, stopped ranks, batches
        # A forward pass gathers then, so that every rank runs all of them.
        together = isinstance(self.gradients, Sharded) and self.gradients.stage == 3
        self.gradients.share_buffers()
        with evaluating(self.model):
            for batch, new in in_step(batches, self.model, lambda: self.requests.stop):
                check_token_ids(self.model, batch)
                sums[3] += new
                given, batch = batch, to_device(batch, self.place)
                self._find_shift([batch])
                count = self.count(given)
                if count or together:
                    with self.precision.autocast():
                        loss = scalar(self.loss(self.model, batch), trained=False)
                    if count and new:
                        sums[:2] += torch.tensor([float(loss) * count, count], dtype=sums.dtype)
        sums[2] = self.requests.stop
        return mean_loss(groups.all_reduce_sum(sums, "evaluation loss"))

    def set_precision(self, name: str) -> None:
        """Changes the precision from the next step on, also where a loss or a hook asks within a
        step; parameters and optimizer state stay.

        `OrderError` for a sharded model, which computes in what `lz.Zero(compute=…)` said.
        """
        if isinstance(self.gradients, Sharded):
            raise OrderError(
                f"precision: the model was sharded to compute in {self.precision.name}; shard it "
                "anew with another lz.Zero(compute=…)"
            )
        before = self.step + self.requests.under_way  # steps in the precision that there was
        found = resolve_plain(name, self.model, self.optimizer, self.decisions, before)
        if not self.requests.put_off(found):
            self._compute_in(found)

    def request_stop(self) -> None:
        """Asks all ranks to stop after the next step: its `StepResult.stop` is True on each. Where
        that step raises, the one after it answers."""
        self.requests.stop = True

    def save(self, root: str | Path, **documents: Any) -> Path:
        """Writes a verified generation under `root` and waits for it; returns its folder.

        `documents` are yours, of plain JSON values and numbers that are not finite; `load` returns
        them. `OrderError` within a step.
        """
        with watch.reporting(), watch.busy("saves"):
            return engine_state.save(self, Path(expand_home(root)), documents)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Loads the newest good generation of a root, or the one named; returns its documents.

        The optimizer's options are the file's, too, unless it had another `lr`, weight decay or the
        like when this engine was made than when the saving one was: that counts then, schedule or
        not, and is told.
        `OrderError` within a step.
        """
        self.requests.refuse_within_step("load")
        documents = engine_state.load(self, Path(expand_home(path)))
        self._set_lr()
        return documents

    def _precision(self, asked: str) -> Precision:
        if not isinstance(self.gradients, Sharded):
            name = resolve_plain(asked, self.model, self.optimizer, self.decisions)
            return Precision(name, self.place)
        name = resolve_sharded(asked, self.model, self.optimizer, self.decisions)
        return Precision(name, self.place, cache=False)

    def _find_shift(self, batches: list[Batch]) -> None:
        """Before the first `labels` are counted: whether the model shifts them (see `Counter`)."""
        for batch in filter(self.count.must_ask, batches):
            with evaluating(self.model), self.precision.autocast():
                shifted = self.count.ask(lambda each: self.loss(self.model, private(each)), batch)
            log.info("labels are counted %s", "after a shift by one" if shifted else "as they are")

    def _compute_in(self, precision: str) -> None:
        record = self.decisions.records["precision"]
        if not record.replayed:  # of a step that raised, it was recorded as of the next
            self.decisions.records["precision"] = dataclasses.replace(record, step=self.step)
        if precision != self.precision.name:
            kept = self.precision.state()["scaler"]
            self.precision = Precision(precision, self.place, scaler=kept)

    # the parts of a step ---------------------------------------------------------------------

    def _agree(self, count: int) -> tuple[int, bool]:
        """The number of counted units over all ranks, and whether any rank wants to stop."""
        stop = self.requests.take_stop()
        if groups.world_size() == 1:
            return count, stop
        outdated = self.gradients.outdated()
        found = before_step(count, stop, outdated, self.optimizer, clip=self.clip)
        self.gradients.agreed(found)
        return found.counted, bool(found.stops)

    def _set_lr(self) -> float:
        planned, last = self.schedule, self.total_steps or 1
        self.options.begin_step(None if planned is None else planned.factor(self.step, last))
        return float(self.optimizer.param_groups[0]["lr"])

    def _passes(
        self, form: speed.Forms, micros: list[Batch], counts: list[int], total: int
    ) -> torch.Tensor:
        """`_backward` in this form, or in another where it fails and nobody asked for it."""
        try:
            with watch.busy("compiles") if form.compiles else contextlib.nullcontext():
                return self._backward(form, micros, counts, total)
        except Exception as error:
            if not self.tuner.failed(error):
                raise
        self._buffers.rewind()
        self.gradients.begin()
        if self.tuner.mended:
            return self._passes(form, micros, counts, total)
        return self.tuner.instead(
            form, lambda other: self._backward(other, micros, counts, total), self.step + 1
        )

    def _backward(
        self, form: speed.Forms, micros: list[Batch], counts: list[int], total: int
    ) -> torch.Tensor:
        """Gradients of the mean over all `total` units; returns the sum over them."""
        summed = LossSum(self.place)
        running = self.gradients.micros(counts)
        for i in running:
            micro, count, last = rewrapped(micros[i]), counts[i], i == running[-1]
            place = groups.rank() * len(micros) + i
            with (
                self.gradients.micro(counts=count > 0, last=last),
                seeded(self.seed, self.step, place),
            ):
                with self.precision.autocast():
                    loss = self.gradients.loss(form.loss, micro)
                    scaled = loss * (count * groups.world_size() / total)
                form.backward(self.precision.scaler.scale(scaled))
            if count:
                summed.add(loss, count)
        return groups.all_reduce_sum(summed.value(), "loss")

    def _gradient_norm(self, held: list[torch.Tensor]) -> float:
        self.precision.scaler.unscale_(self.optimizer)
        if all(p.grad is None for p in held):
            raise OrderError(
                "the loss reached no parameter that the optimizer holds: none has a gradient"
            )
        return self.gradients.norm(held)

    def _held(self) -> list[torch.Tensor]:
        """The optimizer's parameters, in the model's order: what else has a gradient moves nothing,
        and fp16 does not unscale it."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        found: list[torch.Tensor] = [p for p in self.model.parameters() if id(p) in held]
        if len(found) < len(held):  # a layer was replaced, say
            check_held(self.model, self.optimizer.param_groups)
        return found

    def _update(
        self, held: list[torch.Tensor], micros: list[Batch], loss: float, norm: float
    ) -> str | None:
        """Steps the optimizer, or says why not."""
        skipped = None
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped_in_a_row = 0
            if self.clip is not None and norm > self.clip:
                factor = self.clip / (norm + 1e-6)  # as torch's clip_grad_norm_
                torch._foreach_mul_(self.gradients.of(held), factor)
            self.precision.scaler.step(self.optimizer)
            self._buffers.settle()
        else:
            self.gradients.forget_owed()
            self._buffers.rewind()  # what is not finite is looked for in another pass
            try:
                skipped = self._why_skipped(micros, loss, norm)
            finally:
                self._buffers.put_back()
        self.precision.scaler.update()
        drop_gradients(self.model)
        return skipped

    def _why_skipped(self, micros: list[Batch], loss: float, norm: float) -> str:
        if math.isfinite(loss) and self.precision.name == "fp16" and self.precision.scale > 1:
            return f"fp16 overflow at loss scale {self.precision.scale:g}; the scale is lowered"
        self.skipped_in_a_row += 1
        what, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
        culprit = find_on_all(self, micros)
        step, text = self.step + 1, f"{what} is {value}; first at the {culprit}"
        if self.skipped_in_a_row >= self.max_skipped:
            raise NumericsError(
                f"step {step}: {text}. That is non-finite step {self.skipped_in_a_row} in a row "
                f"(max_skipped={self.max_skipped}). Lower the learning rate, clip gradients or "
                "check the data of this step; the skipped steps changed no weight"
            )
        if self.logs_skipped and groups.is_main():  # all ranks know the same
            log.warning("step %d: %s. The step is skipped.", step, text)
        return text
