"""Arguments of an engine that are no numbers, or out of range, are refused in the constructor."""

import numpy as np
import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.train import Callback, RunConfig, Trainer
from lezero.train.engine import Engine


def engine(**options):
    model = nn.Linear(2, 1)
    return Engine(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", **options)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("accumulate", (2.5, "2", True, 0, -1, None)),
        ("max_skipped", (0, 1.5, "3", False)),
        ("total_steps", (0, 1.5, "3", True)),
        ("seed", (1.5, "3", None)),
        ("clip", (0, -1.0, "1", True, float("nan"))),
        ("schedule", ("cosine",)),
        ("compile", ("blok", None, True)),
        ("attention", ("flash", None)),
    ],
)
def test_what_is_not_allowed_is_named(name, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"{name}: got {value!r}, allowed is "):
            engine(**{name: value})


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert engine(accumulate=np.int64(2), clip=np.float32(1), compile="off").accumulate == 2


def test_what_is_no_model_optimizer_or_config_is_named():
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"^model: got a dict, allowed is a torch\.nn\.Module"):
        Engine({}, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match=r"^optimizer: got a NoneType, allowed is"):
        Engine(model, None)
    with pytest.raises(ConfigError, match=r"^config: got a str, .*lz\.RunConfig\.load\(path\)"):
        Trainer("run.yaml")


def test_what_is_no_callback_is_named(tmp_path):
    config = RunConfig.parse({"run": str(tmp_path / "run"), "data": {"train": "python-docs"}})
    for wrong in ([Callback], [object()], [None], None, Callback()):
        with pytest.raises(ConfigError, match=r"^callbacks: got .*derive from lezero\.train\.Call"):
            Trainer(config, callbacks=wrong)
