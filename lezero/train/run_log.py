"""The built-in callback: what a run shows and writes down as it goes. Works on rank 0 only."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

from lezero.core import device, groups
from lezero.core.errors import FileError
from lezero.core.paths import shown
from lezero.memory.pool import give_back_free_blocks
from lezero.profiler.memory import SharedElsewhere, peak_rss, reset_peak_rss, rss
from lezero.report.units import count
from lezero.train.callbacks import Callback
from lezero.train.live import LiveView, RunInfo
from lezero.train.metrics import MetricsWriter, StepRecord, TensorBoardSink
from lezero.train.run_folder import RunFolder
from lezero.train.run_report import write_report

if TYPE_CHECKING:
    from lezero.train.engine import StepResult
    from lezero.train.trainer import Trainer


class RunLog(Callback):
    """Live view, `metrics.jsonl`, TensorBoard and, at the end, the report."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.view = LiveView()
        self.metrics: MetricsWriter | None = None
        self.board: TensorBoardSink | None = None
        self.baseline = 0
        self._elsewhere = SharedElsewhere()
        self._pending: StepRecord | None = None
        self._early: list[tuple[str, str]] = []
        self._started = False
        self._began = time.perf_counter()

    def open(self) -> None:
        if groups.is_main():
            self.metrics = MetricsWriter(self.folder.metrics)

    def measure_from_here(self) -> None:
        """Takes the memory baseline: everything is imported, nothing of the model is there yet.

        What the forecast has freed goes back to the kernel first, or the model would seem to fit in
        no memory at all.
        """
        gc.collect()
        give_back_free_blocks()
        self.baseline = rss() - self._elsewhere.bytes()
        reset_peak_rss()
        device.reset_peak()

    def on_start(self, trainer: Trainer) -> None:
        if self.metrics is None:
            return
        config, engine = trainer.config, trainer.engine
        if config.report.tensorboard:
            self.board = TensorBoardSink(self.folder.path / "tensorboard", trainer.resumed_from)
        parameters = sum(p.numel() for p in engine.model.parameters())
        self.view.start(
            RunInfo(
                name=self.folder.path.name,
                total_steps=config.train.steps,
                first_step=engine.step,
                model=f"{count(parameters)} parameters",
                precision=engine.precision.name,
                device=engine.place.type,
                ranks=groups.world_size(),
                forecast_bytes=trainer.prospect.memory_bytes,
                forecast_seconds=trainer.prospect.step_seconds,
            )
        )
        self._started = True
        if trainer.resumed_from is not None:
            text = f"resumed from step {trainer.resumed_from}"
            self.metrics.event(
                "resume", step=trainer.resumed_from, text=text, changed=trainer.changed
            )
        elif self.metrics.goes_on:
            self.metrics.event("begin", text="begins anew")
        for text, level in self._early:
            self.on_event(trainer, text, level)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self.flush()
        self._pending = StepRecord(
            step=result.step,
            total_steps=trainer.config.train.steps,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            tokens_per_s=result.tokens_per_s,
            seconds=result.seconds,
            memory_bytes=self._step_peak(),
            forecast_bytes=trainer.prospect.memory_bytes,
            share_of_ceiling=trainer.prospect.share_of_ceiling(result.seconds),
            skipped=result.skipped,
        )
        if result.skipped and self.metrics is not None:
            self.metrics.event("skipped", step=result.step, text=result.skipped)

    def on_validation(self, trainer: Trainer, loss: float) -> None:
        if self._pending is not None:
            self._pending = StepRecord(**{**vars(self._pending), "validation_loss": loss})
        elif self.metrics is not None:  # of a step that is written: resumed from, or saved early
            step = trainer.engine.step
            text = f"validation loss {loss:.4g} of step {step}"
            self.metrics.event("validation", step=step, text=text, loss=loss)
            self.view.event(text, "info")
            if self.board is not None:
                self.board.validation(step, loss)

    def on_checkpoint(self, trainer: Trainer, step: int) -> None:
        if self.metrics is not None and trainer.saver is not None:
            stall = round(trainer.saver.stall_seconds, 4)
            peak = self._step_peak()  # of the copy; that of the last one is in no step
            self.metrics.event("checkpoint", step=step, stall_seconds=stall, memory_bytes=peak)

    def on_event(self, trainer: Trainer, text: str, level: str) -> None:
        if not self._started:
            self._early.append((text, level))
            return
        self.flush()
        if self.metrics is not None:
            self.metrics.event("note", step=trainer.engine.step, text=text, level=level)
            self.view.event(text, level)

    def on_end(self, trainer: Trainer) -> None:
        self.flush()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None
            if self.board is not None:
                self.board.close()
            if self._started:
                try:
                    said = f"report: {shown(write_report(self.folder.path))}"
                except (FileError, OSError) as error:
                    said = f"the report was not written: {error}"
                self.view.stop(said)

    def _step_peak(self) -> int:
        """Peak memory of the step that just ended: the accelerator's, or resident above imports.

        Shared memory counts once over its ranks, as in the forecast.
        """
        if device.accelerator() is not None:
            found = device.max_memory_allocated()
            device.reset_peak()
            return found
        found = max(0, peak_rss() - self.baseline - self._elsewhere.bytes())
        reset_peak_rss()
        return found

    def flush(self) -> None:
        """A step is written once its validation, if any, is known."""
        if self._pending is not None and self.metrics is not None:
            self.metrics.step(self._pending)
            self.view.step(self._pending)
            if self.board is not None:
                self.board.step(self._pending)
        self._pending = None
