"""The trainer: a config file's run from data to report, over the same engine as one's own loop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lezero import checkpoint
from lezero.comm import watch
from lezero.core import groups
from lezero.core.decisions import Decision, Decisions
from lezero.core.errors import ConfigError, FileError, LeZeroError
from lezero.data import EvalLoader, Loader
from lezero.data.run_tokenizer import save_as_trained
from lezero.models import Transformer
from lezero.parallel.zero import sharding_of
from lezero.parallel.zero.agreement import agree
from lezero.train import engine_state, recipe
from lezero.train.callbacks import Callback
from lezero.train.config import RunConfig
from lezero.train.engine import Engine, StepResult
from lezero.train.history import (
    BestLosses,
    cursor_of,
    find_checkpoint,
    finite,
    keep_before,
    leave_history,
    mark_best,
    validation_set,
    way_back_told,
)
from lezero.train.prospect import Prospect, foresee
from lezero.train.run_folder import RunFolder, flat
from lezero.train.run_log import RunLog
from lezero.train.signals import StopRequest, graceful_stop
from lezero.train.train_result import TrainResult

_AGAIN = "trying once more"
_OWN = {"run", "model.folder", "report.tensorboard", "data.train", "data.validation"}
_OWN |= {"data.tokenizer.folder"}
"""What may differ between ranks: paths, of which rank 0's count, and what rank 0 alone does."""


class Trainer:
    """Runs `config`: forecast, data, model, resume, steps, validation, checkpoints, report.

    Every rank makes one and calls `run`. `callbacks` are called after the built-in log. While it
    runs, `engine`, `loader`, `data`, `prospect` and `folder` are the parts of the run.
    """

    model: Transformer
    engine: Engine
    loader: Loader
    prospect: Prospect

    def __init__(self, config: RunConfig, callbacks: Sequence[Callback] = ()) -> None:
        if not isinstance(config, RunConfig):
            raise ConfigError(
                f"config: got a {type(config).__name__}, allowed is a RunConfig: "
                "lz.RunConfig.load(path) reads a file, lz.RunConfig.parse(settings) takes a dict"
            )
        given = callbacks if isinstance(callbacks, Sequence) else [callbacks]
        wrong = [each for each in given if not isinstance(each, Callback) or given is not callbacks]
        if wrong:
            raise ConfigError(
                f"callbacks: got {wrong[0]!r:.80}, allowed is a list of objects whose classes "
                "derive from lezero.train.Callback"
            )
        self.config = config
        self.folder = RunFolder(Path(config.run).absolute())  # wherever the process goes
        self.log = RunLog(self.folder)
        self.callbacks: list[Callback] = [self.log, *callbacks]
        self.saver: checkpoint.Saver | None = None
        self.validation: EvalLoader | None = None
        self._bests = BestLosses()
        self.last_loss: float | None = None
        self.last_validation: float | None = None
        self._owes_validation = False
        """Whether the validation that is due at this step is still to be done."""
        self._validated_on: dict[str, Any] | None = None
        """What `best` and `last_validation` are losses on; None: nothing yet."""
        self.resumed_from: int | None = None
        self.changed = False  # since the checkpoint, in what the forecast depends on
        self._saved_step, self._owes_save = -1, False
        self._written: dict[str, Decision] = {}
        self._failed: deque[tuple[int, Exception]] = deque()
        self._notes: list[tuple[str, str]] = []

    @property
    def best(self) -> float | None:
        """The best validation loss of a step that was written, or is about to be."""
        return self._bests.loss

    def run(self) -> TrainResult:
        """Trains to `train.steps` (or a signal) and returns how it ended.

        Raises `LeZeroError` subclasses: bad data or config, one that differs between ranks, a model
        too large for this machine, checkpoints that are all damaged, too many non-finite steps in a
        row, a last checkpoint that could not be written.
        """
        groups.join()
        try:
            with watch.reporting():
                watch.Watch.start()
                self._prepare()
                with way_back_told(self.saver), graceful_stop(self.engine.request_stop) as request:
                    self._tell("on_start")
                    if self.resumed_from is not None:
                        self._tell_beside_log(f"resumed from step {self.resumed_from}")
                    for text, level in self._notes:
                        self.event(text, level)
                    result = self._steps(request)
                    problem = self._save_last()
            self._finish(result)
        finally:
            try:
                if self.saver is not None:
                    self.saver.close()
                self._tell("on_end")
            finally:
                self.folder.release()
                groups.leave()
        if problem:
            raise FileError(
                f"the last checkpoint (step {result.step}) could not be written: "
                f"{problem.rstrip('.')}. Make room and start the run again: it goes on from "
                "the newest checkpoint it has"
            )
        return result

    # before the first step ---------------------------------------------------------------------

    def _prepare(self) -> None:
        config = self.config
        agree("lz train", {k: v for k, v in flat(config.to_dict()).items() if k not in _OWN})
        recipe.check(config)
        self.folder.create()
        with watch.busy("prepares the data"):
            self.data = recipe.build_data(config)
        self.loader, self.validation = recipe.loaders(config, self.data)
        if self.validation is not None and self.data.validation is not None:
            self._validated_on = validation_set(config, self.data.validation)
        found = find_checkpoint(self.folder, config.checkpoint.resume)
        if found is not None:
            self._check_same_run(found)
        self.folder.write_config(config)  # from here on the run is this one
        self.folder.write_json("data.json", self.data.findings)
        self.log.open()  # not before the texts were read: the folder may lie among them
        with watch.busy("forecasts the run"):
            vocab = self.data.tokenizer.vocab_size
            self.prospect = foresee(config, vocab, self.folder, self._kept_precision(found))
        self.log.measure_from_here()
        decisions = Decisions.from_json(found.documents["decisions"]) if found else Decisions()
        self.model = recipe.build_model(config, self.data.tokenizer.vocab_size, decisions)
        if groups.is_main():
            save_as_trained(self.data.tokenizer, self.folder.tokenizer)
        self.engine = recipe.build_engine(config, self.model, decisions)
        self.engine.logs_skipped = False  # the run's own log tells it
        self.saver = checkpoint.Saver(
            self.folder.checkpoints,
            config.checkpoint.keep,
            on_error=self._save_failed,
            together=True,
        )
        if found is not None:
            self._resume()
        else:
            self._notes += leave_history(self.saver, 0)
        self.folder.begin()

    def _kept_precision(self, found: checkpoint.Loaded | None) -> str | None:
        """What a resumed run goes on in; None where the config says it."""
        if found is None or self.config.zero is not None:
            return None
        state = found.documents["state"]["precision"]
        return engine_state.kept_precision(state, self.config.train.precision)

    def _check_same_run(self, loaded: checkpoint.Loaded) -> None:
        """Refuses one of another model, optimizer or data while the folder is untouched."""
        vocab = self.data.tokenizer.vocab_size
        self.loader.seek(cursor_of(loaded, self.config, vocab))

    def _resume(self) -> None:
        """Goes on from the newest generation of which every rank can read what it needs."""
        loaded = engine_state.find(self.engine, self.folder.checkpoints)
        self._check_same_run(loaded)
        groups_now = self.engine.optimizer.param_groups
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups_now]
        documents = engine_state.restore(self.engine, loaded)
        for group, option in zip(self.engine.optimizer.param_groups, options, strict=True):
            group.update(option)  # where the config was changed since, it is what the user wants
        self._take_over(documents["progress"])
        self.resumed_from = self._saved_step = loaded.step
        for path, reason in loaded.rejected:
            self._notes.append((f"{path.name} is damaged and was not used: {reason}", "warning"))
        assert self.saver is not None
        self._notes += leave_history(self.saver, loaded.step)
        if (best := self._bests.step) is not None and not mark_best(self.saver, best):
            self._bests.forget(best)
        changes = self.folder.changes(documents["config"], self.config)
        now = checkpoint.environment()
        differences = checkpoint.environment_difference(documents["environment"], now)
        self.changed = bool(changes or differences)
        for change in changes:
            self._notes.append((f"changed since the checkpoint: {change}", "warning"))
        steps = self.config.train.steps
        if loaded.step >= steps:
            text = f"the run is complete: step {loaded.step} of {steps}; raise train.steps to go on"
            self._notes.append((text, "info"))

    def _take_over(self, progress: dict[str, Any]) -> None:
        """The losses up to the checkpoint, without those on another validation set."""
        self.last_loss = progress.get("loss")
        self._owes_validation = progress.get("owes_validation", False)
        before = progress.get("validated_on")
        if self.validation is None:
            self._validated_on = before  # the losses that are kept are still those on that one
        elif before not in (None, self._validated_on):
            if progress["best"] is not None:
                text = (
                    "the validation set changed since the checkpoint: 'best' begins anew, its loss "
                    f"of {progress['best']:.4g} was on the set before"
                )
                self._notes.append((text, "warning"))
            return
        if progress["best"] is not None:
            self._bests.add(progress["best_step"], progress["best"])
        self.last_validation = progress.get("validation_loss")

    # steps -------------------------------------------------------------------------------------

    def _steps(self, request: StopRequest) -> TrainResult:
        engine, config = self.engine, self.config
        stopped = self._catch_up()
        while engine.step < config.train.steps and not stopped:
            result = engine.train_step(next(self.loader))
            self.last_loss = finite(result.loss)
            self._owes_validation = self.validation is not None and (
                engine.step == config.train.steps or engine.step % config.validation.every == 0
            )  # before a callback saves this step
            self._tell("on_step", result)
            if result.skipped:
                self._tell_beside_log(f"step {result.step} skipped: {result.skipped}", "warning")
            if engine.decisions.records != self._written:
                self._try_to_write("decisions.json", self._write_decisions)
            stopped = self._after(result)
            if engine.step < config.train.steps and not stopped:
                self._tell_failures()  # those of the last step are told when it is tried again
        status = 0
        if stopped and (engine.step < config.train.steps or self._owes_validation):
            status = max(groups.gather_objects(request.exit_status))
            text = f"asked to stop: saving step {engine.step}, a later start resumes"
            self.event(text, "warning")
        ended = (self.last_loss, self.last_validation, status)
        return TrainResult(self.folder.path, engine.step, *ended)

    def _after(self, result: StepResult) -> bool:
        """Validation and checkpoint where they are due; returns whether the run stops here."""
        every, stop = self.config.checkpoint.every, result.stop
        self._owes_save |= every > 0 and result.step % every == 0
        if self._owes_validation:
            stop = not self._validate(stop)
        if self._owes_save and not self.engine.skipped_in_a_row:  # the weights may be ruined then
            self.save()
        return stop

    def _catch_up(self) -> bool:
        """Runs the validation that a stop left out before; returns whether the run stops here."""
        if not self._owes_validation or self.validation is None:
            return False
        return not self._validate()

    def _validate(self, stop: bool = False) -> bool:
        """Returns whether it was done: a stop, asked for before or meanwhile, leaves it out."""
        assert self.validation is not None
        loss = None if stop else self.engine.evaluate(self.validation)
        if loss is None:
            self.event("asked to stop: this step's validation is left to a later start", "warning")
            return False
        self.last_validation = finite(loss)
        self._tell("on_validation", loss)
        self._owes_validation = False
        ends = self._saved_step, self.config.train.steps
        written = self.config.checkpoint.every or self.engine.step in ends
        written = written and not self.engine.skipped_in_a_row
        self._saved_step = -1  # what is saved of this step does not know this validation
        better = written and math.isfinite(loss) and (self.best is None or loss < self.best)
        if groups.broadcast_object(better):  # a failed write is heard of sooner by one than another
            self._bests.add(self.engine.step, loss)
            self.save("best")
        return True

    def save(self, mark: str | None = None) -> None:
        """Hands this step to the background writer, once; `mark` names it "best" or "last"."""
        step = self.engine.step
        if self._saved_step != step:
            self.log.flush()  # a step that a resume goes on from is never missing in the metrics
            with watch.busy("saves a checkpoint"):
                self._hand_over(step)
            self._saved_step, self._owes_save = step, False
            self._tell("on_checkpoint", step)
        failed = any(bad == step for bad, _ in list(self._failed))  # another thread adds to it
        if mark is not None and self.saver is not None and not failed:
            try:
                self.saver.mark(mark, step)
            except (FileError, OSError) as error:
                self.event(f"step {step} could not be marked '{mark}': {error}", "warning")

    def _hand_over(self, step: int) -> None:
        packed = engine_state.pack(self.engine)
        documents = packed.documents | {
            "cursor": self.loader.state(),
            "progress": {
                "best": self._bests.loss,
                "best_step": self._bests.step,
                "loss": self.last_loss,
                "validation_loss": self.last_validation,
                "validated_on": self._validated_on,
                "owes_validation": self._owes_validation,
            },
            "config": self.config.to_dict(),
            "model": self.model.config.to_dict(),
        }
        if self.saver is not None:
            self.saver.save(step, packed.tensors, documents, packed.own)

    def _save_last(self) -> str:
        """Saves this step and waits for it, with a second try; what went wrong, on every rank."""
        if self._saved_step != self.engine.step and (text := keep_before(self.saver, self.engine)):
            self.event(text, "warning")
        for then in (_AGAIN, ""):
            self.save("last")
            if self._bests.step == self.engine.step:
                self.save("best")
            with watch.busy("writes its last checkpoint"):
                error = self.saver.wait() if self.saver is not None else None
            self._tell_failures(then)
            problem = groups.broadcast_object(str(error or ""))
            if not problem:
                return ""
            self._saved_step = -1
        return problem

    def _save_failed(self, step: int, error: Exception) -> None:
        """Called by the writing thread: callbacks hear of it on the main one."""
        self._failed.append((step, error))

    def _tell_failures(self, then: str = "training goes on") -> None:
        """`then`: what happens now; empty for the last try, whose failure ends the run anyway."""
        while self._failed:
            step, error = self._failed.popleft()
            if then != _AGAIN or step != self.engine.step:
                self._bests.forget(step)
            if then:
                self.event(f"checkpoint of step {step} was not written, {then}: {error}", "error")

    # after the last step -----------------------------------------------------------------------

    def _finish(self, result: TrainResult) -> None:
        if result.exit_status != 0:
            return
        sharding = sharding_of(self.model)
        together = sharding is not None and sharding.stage == 3  # a forward pass gathers then
        if sharding is not None and not together:
            sharding.gather()
        if groups.is_main() or together:
            self._try_to_write("sample.json", self._write_samples)

    def _write_decisions(self) -> None:
        self._written = dict(self.engine.decisions.records)
        self.folder.write_decisions(self.engine.decisions)

    def _write_samples(self) -> None:
        self.folder.write_samples(self.model, self.data.tokenizer, self.config.report)

    def _try_to_write(self, name: str, write: Callable[[], None]) -> None:
        """A file beside the checkpoints is not worth the training."""
        try:
            write()
        except (OSError, LeZeroError) as error:
            reason = getattr(error, "strerror", None) or error
            self.event(f"{name} was not written: {reason}", "warning")

    def event(self, text: str, level: str = "info") -> None:
        """Tells every callback something that a person should see."""
        self._tell("on_event", text, level)

    def _tell_beside_log(self, text: str, level: str = "info") -> None:
        """An event that the built-in log has shown and written in a form of its own."""
        for callback in self.callbacks:
            if callback is not self.log:
                callback.on_event(self, text, level)

    def _tell(self, what: str, *values: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, what)(self, *values)
