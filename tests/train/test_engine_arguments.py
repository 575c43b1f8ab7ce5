"""Arguments of an engine that are no numbers, or out of range, are refused in the constructor."""

import numpy as np
import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError, OrderError
from lezero.nn import DynamicWeightGenerator
from lezero.optim import AdamW
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


def test_numbers_of_numpy_are_numbers_and_can_be_saved(tmp_path):
    model = nn.Linear(2, 1)
    made = Engine(
        model, torch.optim.SGD(model.parameters(), np.float32(0.1)), precision="fp32",
        loss=lambda model, x: model(x).mean(), compile="off", accumulate=np.int64(2),
        clip=np.float32(1), seed=np.int64(3), total_steps=np.int16(9), max_skipped=np.int64(4),
    )  # fmt: skip
    made.train_step(torch.ones(4, 2))
    made.load(made.save(tmp_path))
    kinds = {type(x) for x in (made.accumulate, made.seed, made.total_steps, made.max_skipped)}
    assert kinds == {int}


def test_what_is_no_model_optimizer_or_config_is_named():
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"^model: got a dict, allowed is a torch\.nn\.Module"):
        Engine({}, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match=r"^optimizer: got a NoneType, allowed is"):
        Engine(model, None)
    with pytest.raises(ConfigError, match=r"^config: got a str, .*lz\.RunConfig\.load\(path\)"):
        Trainer("run.yaml")


@pytest.mark.parametrize("layer", [nn.LazyLinear, nn.LazyBatchNorm1d, DynamicWeightGenerator])
def test_layers_without_a_size_are_refused_until_they_have_one(layer):
    first = layer(4) if layer is nn.LazyLinear else layer()
    model = nn.Sequential(nn.Linear(2, 4), first, nn.Linear(4, 1))
    rest = torch.optim.SGD(model[0].parameters(), 0.1)
    with pytest.raises(OrderError, match=r"has no size yet.* call the model once on a batch"):
        Engine(model, rest, precision="fp32")
    with pytest.raises(OrderError, match="has no size yet"):
        AdamW(model)
    model(torch.ones(3, 2))
    engine = Engine(model, AdamW(model), loss=lambda m, x: m(x).mean(), precision="fp32")
    assert engine.train_step(torch.randn(3, 2)).skipped is None


def test_weight_decay_applies_to_a_matrix_that_took_its_size_from_a_batch():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    model(torch.ones(3, 2))
    decayed = AdamW(model, weight_decay=0.5).param_groups[0]["params"]
    assert any(p is model[0].weight for p in decayed)


def test_what_is_no_callback_is_named(tmp_path):
    config = RunConfig.parse({"run": str(tmp_path / "run"), "data": {"train": "python-docs"}})
    for wrong in ([Callback], [object()], [None], None, Callback()):
        with pytest.raises(ConfigError, match=r"^callbacks: got .*derive from lezero\.train\.Call"):
            Trainer(config, callbacks=wrong)


def test_checkpoints_have_the_names_of_the_model_inside_a_wrapper(tmp_path):
    torch.manual_seed(0)
    x, made = torch.randn(4, 2), []
    for wrap in (torch.compile, lambda model: model):
        model = wrap(nn.Linear(2, 1))
        made.append(
            Engine(
                *(model, torch.optim.AdamW(model.parameters(), 0.1)),
                precision="fp32",
                loss=lambda model, x: model(x).square().mean(),
                compile="off",
            )
        )
    compiled, plain = made
    compiled.model.compile(backend="eager")
    compiled.train_step(x)
    plain.load(compiled.save(tmp_path / "a"))
    assert torch.equal(plain.model.weight, compiled.model.weight)
    assert plain.train_step(x).loss == pytest.approx(compiled.train_step(x).loss)
    compiled.load(plain.save(tmp_path / "b"))
    assert compiled.step == 2
