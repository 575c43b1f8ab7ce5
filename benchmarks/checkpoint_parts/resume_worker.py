"""One rank of a run that `resume.py` starts: trains, and is killed where it was told to be.

Run: python resume_worker.py CONFIG.yaml KILL_AT   (a step number; 0: never)
"""

from __future__ import annotations

import os
import random
import signal
import sys

import numpy
import torch

from lezero.core import groups
from lezero.elastic import restarts
from lezero.train import Callback, RunConfig, StepResult, Trainer


class Killer(Callback):
    """A user's code that draws random numbers, and a kill.

    Kills the last rank, on its first life, with a real SIGKILL after step `step`.

    Rank 0 first lets the generation before it reach the disk, so that every kill finds the same
    one; what a kill in the middle of a write does is the corruption part's subject.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, trainer: Trainer) -> None:
        if trainer.resumed_from is None:
            random.seed(groups.rank())
            numpy.random.seed(groups.rank())
            torch.manual_seed(groups.rank())

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        random.random(), numpy.random.random(), torch.rand(())  # what a resume must carry on
        if restarts() > 0:
            return
        if result.step == self.step - 1 and trainer.saver is not None:
            trainer.saver.wait()
        if result.step == self.step and groups.rank() == groups.world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    config, kill_at = sys.argv[1], int(sys.argv[2])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the table of the benchmark stays readable
    raise SystemExit(Trainer(RunConfig.load(config), [Killer(kill_at)]).run().exit_status)
