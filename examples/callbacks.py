"""Callbacks of the trainer: one keeps the slowest steps, one stops when nothing improves."""

import tempfile

import lezero as lz
from lezero.train import Callback


class SlowSteps(Callback):
    """Remembers how long each step took."""

    def __init__(self):
        self.seconds = {}

    def on_step(self, trainer, result):
        self.seconds[result.step] = result.seconds

    def on_end(self, trainer):
        slowest = sorted(self.seconds, key=self.seconds.get)[-3:]
        print(f"the slowest steps: {slowest}")


class Patience(Callback):
    """Asks for an end when the validation loss has not improved `most` times in a row."""

    def __init__(self, most):
        self.most, self.best, self.bad = most, float("inf"), 0

    def on_validation(self, trainer, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        if self.bad >= self.most:
            trainer.event(f"validation did not improve {self.bad} times: stopping", "warning")
            trainer.engine.request_stop()


def main():
    with tempfile.TemporaryDirectory() as folder:
        config = lz.RunConfig.parse(
            {
                "run": f"{folder}/patience",
                "model": {"layers": 1, "dim": 32, "heads": 2},
                "data": {"train": "python-docs", "tokenizer": "bytes", "sequence": 32},
                # A learning rate that is much too high, so that there is something to stop.
                "train": {"steps": 100, "batch": 8, "lr": 3.0, "schedule": {"kind": "constant"}},
                "validation": {"every": 5, "batches": 2},
                "report": {"sample_tokens": 0},
            }
        )
        result = lz.Trainer(config, callbacks=[SlowSteps(), Patience(2)]).run()
        print(f"ended at step {result.step} of {config.train.steps}")


if __name__ == "__main__":
    main()
