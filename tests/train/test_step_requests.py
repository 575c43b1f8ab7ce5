"""What is asked of an engine while a step is under way, or taken by one that raises."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lezero.core.errors import ConfigError, OrderError
from lezero.train.engine import Engine


def make(within=lambda engine: None, **options):
    """An engine whose loss calls `within(engine)`."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        within(engine)
        return F.cross_entropy(model(batch["x"]), batch["targets"])

    options = {"precision": "fp32", **options}
    engine = Engine(model, optimizer, loss=loss, compile="off", **options)
    return engine


def batch(masked=False):
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(3, (8,), generator=generator)
    x = torch.randn(8, 6, generator=generator)
    return {"x": x, "targets": targets.fill_(-100) if masked else targets}


def test_a_stop_that_a_step_took_which_raised_is_answered_by_the_next():
    engine = make()
    engine.request_stop()
    for _ in range(2):
        with pytest.raises(ConfigError, match="nothing in this batch counts"):
            engine.train_step(batch(masked=True))
    assert [engine.train_step(batch()).stop for _ in range(2)] == [True, False]


def test_a_stop_that_is_asked_for_within_a_step_is_answered_by_the_next():
    engine = make(lambda engine: engine.step == 0 and engine.request_stop())
    assert [engine.train_step(batch()).stop for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize("place", [1, 3, 4])
def test_a_precision_asked_for_within_a_step_counts_from_the_next_on(place):
    """In a micro-batch of four, after others have left gradients without a loss scale."""
    calls = []

    def ask(engine):
        calls.append(engine.precision.name)
        if len(calls) == place:
            engine.set_precision("fp16")

    engine, plain = make(ask, accumulate=4), make(accumulate=4)
    result, expected = engine.train_step(batch()), plain.train_step(batch())
    assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
    assert torch.equal(engine.model.weight, plain.model.weight)
    assert engine.precision.name == "fp16", "an evaluation or a save now has it"
    assert engine.decisions.records["precision"].step == 1
    engine.train_step(batch())
    assert calls == ["fp32"] * 4 + ["fp16"] * 4


def test_a_precision_asked_for_by_a_hook_or_in_a_step_that_raises_is_taken_too():
    engine = make()
    hook = engine.optimizer.register_step_post_hook(lambda *_: engine.set_precision("fp16"))
    assert engine.train_step(batch()).skipped is None
    assert engine.precision.name == "fp16"
    hook.remove()

    def ask(*_):
        engine.set_precision("bf16")
        raise RuntimeError("of the user")

    hook = engine.optimizer.register_step_pre_hook(ask)
    with pytest.raises(RuntimeError, match="of the user"):
        engine.train_step(batch())
    hook.remove()
    assert engine.precision.name == "bf16"
    assert engine.decisions.records["precision"].step == engine.step == 1
    engine.set_precision("fp16")
    assert engine.train_step(batch()).skipped is None
    assert engine.step == 2


def test_a_precision_that_there_is_not_is_refused_where_it_is_asked_for():
    engine = make(lambda engine: engine.set_precision("fp8"))
    with pytest.raises(ConfigError, match="precision: got 'fp8'"):
        engine.train_step(batch())
    assert engine.precision.name == "fp32"


def test_a_save_load_or_step_within_a_step_is_refused_and_after_it_is_not(tmp_path):
    path = make().save(tmp_path / "first")
    calls = {
        "save": lambda engine: engine.save(tmp_path / "half"),
        "load": lambda engine: engine.load(path),
        "train_step": lambda engine: engine.train_step(batch()),
    }
    for name, call in calls.items():
        engine = make(lambda engine, call=call: engine.step == 1 and call(engine))
        engine.train_step(batch())
        with pytest.raises(
            OrderError,
            match=rf"^Engine\.{name}: .*Call {name} after train_step.*a signal handler: set a flag",
        ):
            engine.train_step(batch())
        engine.load(engine.save(tmp_path / name))
        assert engine.step == 1
    assert not (tmp_path / "half").exists()
