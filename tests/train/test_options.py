"""Which options count after a load, the learning rate before all, and that the optimizer says the
same as the engine."""

import logging

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lezero.optim import Schedule
from lezero.train.engine import Engine

HALF = Schedule(kind="constant", warmup=2)
LATE = Schedule(kind="linear", final=0.0)


def make(lr, schedule=None, before=lambda optimizer: None):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=lr)
    before(optimizer)
    return Engine(
        model, optimizer, loss=lambda model, x: model(x).mean(), schedule=schedule, total_steps=4,
        precision="fp32", compile="off",
    )  # fmt: skip


def built(kind, then=None, **options):
    """An engine with a step behind it, whose options were `built` and then set to others."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    engine = Engine(model, optimizer, loss=loss, precision="fp32", compile="off")
    step(engine)
    optimizer.param_groups[0].update(then or {})
    return engine


def step(engine):
    return engine.train_step(torch.ones(3, 2)).lr


def saved(folder, lr, schedule=None, then=None):
    """A generation of a run with base `lr`, whose rate was set to `then` in the end."""
    engine = make(lr, schedule)
    step(engine)
    for group in engine.optimizer.param_groups:
        group["lr"] = group["lr"] if then is None else then
    return engine.save(folder)


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "lezero.train")
    return lambda: [record.getMessage() for record in caplog.records if "lr=" in record.message]


@pytest.mark.parametrize("schedule", [None, Schedule(kind="constant"), HALF, LATE])
def test_another_rate_than_the_saved_run_had_counts_and_is_told(tmp_path, told, schedule):
    path = saved(tmp_path, 0.1, schedule)
    engine = make(0.01, schedule)
    engine.load(path)
    factor = 1.0 if schedule is None else schedule.factor(1, 4)
    for group in engine.optimizer.param_groups:
        assert (group["engine_lr"], group["lr"]) == (0.01, 0.01 * factor)
    assert step(engine) == 0.01 * factor
    assert told() == [
        f"group {number} of the optimizer was trained with lr=0.1 and is given lr=0.01 now, which "
        "counts from here on"
        for number in (0, 1)
    ]


@pytest.mark.parametrize("schedule", [None, HALF])
def test_a_rate_set_in_mid_run_goes_on_where_the_run_is_built_as_before(tmp_path, told, schedule):
    """As torch's schedulers set it; a schedule of LeZero's sets it anew at every step."""
    path = saved(tmp_path, 0.1, schedule, then=0.025)
    engine = make(0.1, schedule)
    engine.load(path)
    assert [group["engine_lr"] for group in engine.optimizer.param_groups] == [0.1, 0.1]
    assert step(engine) == (0.025 if schedule is None else 0.1)
    assert told() == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_later_engine_begins_from_the_rate_that_counted(tmp_path, steps):
    path = saved(tmp_path, 0.1, HALF)
    engine = make(0.01, HALF)
    engine.load(path)
    for _ in range(steps):
        step(engine)
    later = Engine(
        engine.model, engine.optimizer, loss=engine.loss, schedule=HALF, total_steps=4,
        precision="fp32", compile="off",
    )  # fmt: skip
    assert step(later) == 0.005


def test_a_rate_in_a_tensor_is_not_the_groups_own_base(tmp_path, told):
    path = saved(tmp_path, torch.tensor(0.1), then=torch.tensor(0.025))
    given = (0.1, torch.tensor, 0.025), (0.1, float, 0.025), (0.01, torch.tensor, 0.01)
    for base, kind, counts in given:
        engine = make(kind(base))
        engine.load(path)
        for group in engine.optimizer.param_groups:
            assert float(group["engine_lr"]) == pytest.approx(base)
            assert isinstance(group["lr"], torch.Tensor) is (kind is torch.tensor)
        assert step(engine) == pytest.approx(counts)
    assert len(told()) == 2


def test_a_group_that_joined_has_a_rate_of_its_own(tmp_path):
    engine = make(0.1)
    late = nn.Parameter(torch.ones(()))
    engine.model.register_parameter("late", late)
    engine.optimizer.add_param_group({"params": [late], "lr": 0.4})
    path = engine.save(tmp_path)
    for given, counts in ((0.4, 0.4), (0.2, 0.2)):
        other = make(0.1)
        late = nn.Parameter(torch.ones(()))
        other.model.register_parameter("late", late)
        other.optimizer.add_param_group({"params": [late], "lr": given})
        other.load(path)
        assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 0.1, counts]


def test_a_group_that_joined_goes_on_with_a_rate_set_since(tmp_path, told):
    """Its base is the rate that it was trained with first, whenever a save asks for it."""

    def joined():
        engine = make(0.1)
        engine.model.register_parameter("late", nn.Parameter(torch.ones(())))
        engine.optimizer.add_param_group({"params": [engine.model.late], "lr": 0.4})
        return engine

    engine = joined()
    step(engine)
    engine.optimizer.param_groups[-1]["lr"] = 0.05
    path = engine.save(tmp_path)
    other = joined()
    other.load(path)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 0.1, 0.05]
    assert told() == []


@pytest.mark.parametrize("schedule", [None, HALF])
def test_a_state_of_another_optimizer_takes_no_base_rate_away(tmp_path, told, schedule):
    weights = [p.shape for p in make(0.1).model.parameters()]
    old = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(s))]} for s in weights], lr=0.5)
    engine = make(0.1, schedule)
    engine.optimizer.load_state_dict(old.state_dict())
    rates = [step(engine), step(engine)]
    assert rates == ([0.5, 0.5] if schedule is None else [0.1 * HALF.factor(i, 4) for i in (0, 1)])
    assert [group["engine_lr"] for group in engine.optimizer.param_groups] == [0.1, 0.1]
    engine.save(tmp_path)
    for other in (engine, make(0.1, schedule)):
        other.load(tmp_path)
        assert step(other) == (0.5 if schedule is None else 0.1)
    assert told() == []


def test_a_scheduler_of_torch_made_after_the_engine_goes_on_after_a_load(tmp_path, told):
    """It puts a rate of its own into `initial_lr`, which is no other base of the engine."""

    def started():
        engine = make(0.1)
        return engine, lr_scheduler.OneCycleLR(engine.optimizer, 1.0, total_steps=10)

    engine, scheduler = started()
    for _ in range(3):
        step(engine)
        scheduler.step()
    path, rate = engine.save(tmp_path), scheduler.get_last_lr()[0]
    other, _ = started()
    other.load(path)
    assert step(other) == rate != 0.1
    assert told() == []


def begun(lr, order):
    """An engine, and a scheduler of torch's that was made before or after it, or not at all."""
    made = []

    def add(optimizer, at):
        if order == at:
            made.append(lr_scheduler.LinearLR(optimizer, 0.1))

    engine = make(lr, before=lambda optimizer: add(optimizer, "before"))
    add(engine.optimizer, "after")
    return engine, *made


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("again", ["before", "after", "never"])
@pytest.mark.parametrize("given", [0.1, 0.2])
def test_a_scheduler_of_torch_is_no_other_rate_whenever_it_is_made(
    tmp_path, told, order, again, given
):
    engine, scheduler = begun(0.1, order)
    for _ in range(3):
        step(engine)
        scheduler.step()
    rate = scheduler.get_last_lr()[0]
    path = engine.save(tmp_path)
    other, *_ = begun(given, again)
    base = other.optimizer.param_groups[0]["engine_lr"]
    other.load(path)
    assert step(other) == (rate if given == 0.1 else base)
    assert len(told()) == (0 if given == 0.1 else 2)


SCHEDULERS = {
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3),
    "by hand, then lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s),
    "two in a row": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, 10),
        ],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_sets_the_rates_that_it_sets_without_an_engine(name):
    seen = []
    for with_engine in (False, True):
        engine = make(0.1)
        optimizer = engine.optimizer
        if not with_engine:
            optimizer = torch.optim.SGD(
                [{"params": [p]} for p in engine.model.parameters()], lr=0.1
            )
        for group in optimizer.param_groups:
            group["lr"] = 0.5 if "hand" in name else 0.1
        scheduler, rates = SCHEDULERS[name](optimizer), []
        for _ in range(6):
            rates.append([group["lr"] for group in optimizer.param_groups])
            step(engine)
            optimizer.step()
            scheduler.step()
        seen.append(rates)
    assert seen[0] == seen[1]


ADAM, SGD, RMS = torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop
TRAINED = "group 0 of the optimizer was trained with "
CHANGED = (
    (ADAM, {"weight_decay": 0.1}, {"weight_decay": 0.5}, "weight_decay=0.1", "weight_decay=0.5"),
    (ADAM, {"betas": (0.9, 0.99)}, {"betas": (0.9, 0.9)}, "betas=(0.9, 0.99)", "betas=(0.9, 0.9)"),
    (ADAM, {"eps": 1e-8}, {"eps": 1e-6}, "eps=1e-08", "eps=1e-06"),
    (
        ADAM, {"lr": 0.1, "maximize": True}, {"lr": 0.2}, "lr=0.1, maximize=True",
        "lr=0.2, maximize=False",
    ),
    (ADAM, {"amsgrad": True}, {"amsgrad": False}, "amsgrad=True", "amsgrad=False"),
    (SGD, {"momentum": 0.9}, {"momentum": 0.8}, "momentum=0.9", "momentum=0.8"),
    (SGD, {"momentum": 0.9}, {"momentum": 0.0}, "momentum=0.9", "momentum=0"),
    (
        SGD, {}, {"momentum": 0.9, "nesterov": True}, "momentum=0, nesterov=False",
        "momentum=0.9, nesterov=True",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "there", "here", "before", "now"), CHANGED)
def test_an_option_that_this_engine_was_built_with_counts_and_is_told(
    tmp_path, caplog, kind, there, here, before, now
):
    path = built(kind, **there).save(tmp_path)
    engine = built(kind, **here)
    wanted = dict(engine.optimizer.param_groups[0])
    engine.load(path)
    group = engine.optimizer.param_groups[0]
    assert {key: group[key] for key in engine.optimizer.defaults} == {
        key: wanted[key] for key in engine.optimizer.defaults
    }
    count = "count" if "," in before.split(")")[-1] else "counts"
    assert f"{TRAINED}{before} and is given {now} now, which {count} from here on" in caplog.text
    step(engine)
    caplog.clear()
    built(kind, **here).load(engine.save(tmp_path))
    assert TRAINED not in caplog.text


@pytest.mark.parametrize(
    ("kind", "then"),
    [
        (ADAM, {"weight_decay": 0.0}),
        (ADAM, {"betas": (0.5, 0.9)}),
        (SGD, {"momentum": 0.5, "nesterov": True}),
    ],
)
def test_an_option_set_in_mid_run_goes_on_where_the_run_is_built_as_before(
    tmp_path, caplog, kind, then
):
    options = {"momentum": 0.9} if kind is SGD else {}
    path = built(kind, then, **options).save(tmp_path)
    for _ in range(2):
        engine = built(kind, **options)
        engine.load(path)
        group = engine.optimizer.param_groups[0]
        assert {key: group[key] for key in then} == then
        path = engine.save(tmp_path)
    assert "was trained with" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "option"),
    [(ADAM, {"amsgrad": True}), (RMS, {"momentum": 0.9}), (RMS, {"centered": True})],
)
def test_an_option_whose_state_was_not_saved_stays_off_and_is_told(tmp_path, caplog, kind, option):
    path = built(kind).save(tmp_path)
    engine = built(kind, **option)
    engine.load(path)
    (key, given), *_ = option.items()
    assert not engine.optimizer.param_groups[0][key]
    assert f"is given {key}={given} now, for which its state was not saved" in caplog.text
    step(engine)
    caplog.clear()
    engine.load(engine.save(tmp_path))
    assert f"is given {key}={given} now" in caplog.text  # each time, since it is still off


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("again", ["before", "after"])
def test_a_scheduler_that_moves_the_momentum_is_no_other_option(tmp_path, caplog, order, again):
    def started(order):
        made = []

        def cycle(optimizer):
            made.append(lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10))

        engine = make(0.1, before=cycle if order == "before" else lambda optimizer: None)
        if order == "after":
            cycle(engine.optimizer)
        return engine, *made

    engine, scheduler = started(order)
    for _ in range(3):
        step(engine)
        scheduler.step()
    momentum = engine.optimizer.param_groups[0]["momentum"]
    path = engine.save(tmp_path)
    other, _ = started(again)
    other.load(path)
    assert other.optimizer.param_groups[0]["momentum"] == momentum
    assert "momentum=" not in caplog.text


@pytest.mark.parametrize("cycled", [False, True])
def test_betas_count_beside_a_scheduler_that_moves_the_first(tmp_path, caplog, cycled):
    """One of the run before moves nothing here; one that is here moves the first alone."""
    engine = built(ADAM)
    scheduler = lr_scheduler.OneCycleLR(engine.optimizer, 1.0, total_steps=10)
    for _ in range(3):
        step(engine)
        scheduler.step()
    moved = engine.optimizer.param_groups[0]["betas"][0]
    path = engine.save(tmp_path)
    other = built(ADAM, betas=(0.7, 0.95))
    if cycled:
        lr_scheduler.OneCycleLR(other.optimizer, 1.0, total_steps=10)
    other.load(path)
    first = moved if cycled else 0.7
    assert other.optimizer.param_groups[0]["betas"] == pytest.approx((first, 0.95))
    assert "betas=" in caplog.text
