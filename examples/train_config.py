"""Trains the run of train.yaml from Python, as `lz train examples/train.yaml` does."""

from pathlib import Path

import lezero as lz


def main():
    config = lz.RunConfig.load(
        Path(__file__).with_name("train.yaml"), ["train.seed=1", "train.precision=fp32"]
    )
    result = lz.Trainer(config).run()
    print(f"step {result.step}, validation loss {result.validation_loss}")
    print("the run's folder:", ", ".join(sorted(path.name for path in result.run.iterdir())))
    return result.exit_status


if __name__ == "__main__":
    raise SystemExit(main())
