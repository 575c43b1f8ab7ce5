"""Optimizers of torch under the engine: sparse gradients, late parameters, masters, refusals."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lezero.core.errors import ConfigError, LeZeroError, NumericsError, OrderError
from lezero.optim import AdamW, AdamW8bit, Schedule
from lezero.train.engine import Engine


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_sparse_gradients_equal_a_plain_loop(compile):
    def bags():
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    data = {"x": torch.randint(9, (8, 5)), "y": torch.randint(3, (8,))}
    model, optimizer = bags()
    engine = Engine(
        model, optimizer, loss=loss, clip=0.05, accumulate=2, precision="fp32", compile=compile
    )
    result = engine.train_step(data)
    other, plain = bags()
    loss(other, data).backward()
    table = other[0].weight
    table.grad = table.grad.to_dense()
    norm = nn.utils.clip_grad_norm_(other.parameters(), 0.05)
    plain.step()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-6)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    assert "weights of module '0'" in engine.train_step(data).skipped


def test_parameters_that_join_later_follow_the_schedule():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    engine = Engine(
        model, optimizer, loss=lambda model, x: model(x).mean(), precision="fp32", compile="off",
        schedule=Schedule(kind="linear", final=0.0), total_steps=4,
    )  # fmt: skip
    engine.train_step(torch.ones(3, 2))
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.4})
    engine.train_step(torch.ones(3, 2))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.2])


@pytest.mark.parametrize(
    "join",
    [
        lambda optimizer, late: optimizer.add_param_group({"params": [late]}),
        lambda optimizer, late: optimizer.param_groups[0]["params"].append(late),
    ],
)
def test_parameters_that_join_later_are_the_models(join):
    """The engine empties the gradients of those alone."""
    model, late, calls = nn.Linear(2, 1), nn.Parameter(torch.zeros(3)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, x):
        calls.append(x)
        return model(x).mean() + late.sum()

    engine = Engine(model, optimizer, loss=loss, precision="fp32", compile="off")
    engine.train_step(torch.ones(3, 2))
    join(optimizer, late)
    for _ in range(2):
        with pytest.raises(OrderError, match=r"1 of 3 param.* not have, the first of shape \(3,\)"):
            engine.train_step(torch.ones(3, 2))
    assert (engine.step, len(calls)) == (1, 1)
    model.late = late
    for _ in range(2):
        engine.train_step(torch.ones(3, 2))
    assert late.tolist() == pytest.approx([-0.2] * 3)


def test_a_layer_that_is_replaced_needs_another_optimizer():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def made():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Engine(
            model, optimizer, loss=lambda m, x: m(x).mean(), precision="fp32", compile="off"
        )

    engine = made()
    engine.train_step(torch.ones(3, 2))
    model[1] = nn.Linear(2, 1)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(OrderError, match=r"2 of 4 param.*a new optimizer and Engine where"):
            engine.train_step(torch.ones(3, 2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert made().train_step(torch.ones(3, 2)).step == 1


def test_an_optimizer_that_asks_for_the_loss_itself_is_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"^optimizer: LBFGS asks for the loss several times"):
        Engine(model, torch.optim.LBFGS(model.parameters()))


def test_norm_and_clipping_are_over_what_the_optimizer_holds_in_every_precision():
    torch.manual_seed(0)
    start, x = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 4)), torch.randn(4, 6)

    def loss(model, x):
        return model(x).square().mean()

    plain = copy.deepcopy(start)
    loss(plain, x).backward()
    wanted = float(nn.utils.get_total_norm([p.grad for p in plain[1].parameters()]))
    for precision, near in (("fp32", 1e-6), ("bf16", 0.02), ("fp16", 0.02)):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
        options = {"precision": precision, "compile": "off", "clip": 0.01}
        engine = Engine(model, optimizer, loss=loss, **options)
        while (result := engine.train_step(x)).skipped and engine.step < 9:
            pass  # until the loss scale of fp16 fits
        assert result.grad_norm == pytest.approx(wanted, rel=near)
        moved = [a - b for a, b in zip(model.parameters(), start.parameters(), strict=True)]
        assert float(nn.utils.get_total_norm(moved)) == pytest.approx(0.01, rel=1e-3)


def test_a_loss_that_reaches_nothing_of_the_optimizer_is_told():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
    for precision in ("fp32", "fp16"):
        engine = Engine(
            model, optimizer, loss=lambda m, x: m[0](x).mean(), precision=precision, compile="off"
        )
        for _ in range(2):  # an error does not spoil the next step
            with pytest.raises(OrderError, match="reached no parameter that the optimizer holds"):
                engine.train_step(torch.ones(3, 2))


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "fp16"])
def test_fp16_weights_are_refused_in_each_precision(precision):
    model = nn.Linear(2, 1).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    told = r"^precision: .* 'weight' is in fp16, and 1 more are; call model\.float\(\)"
    with pytest.raises(ConfigError, match=told):
        Engine(model, optimizer, precision=precision)
    model.bias.requires_grad_(False)
    model.weight.data = model.weight.data.float()
    engine = Engine(model, optimizer, precision="fp32")
    model.weight.data = model.weight.data.half()
    with pytest.raises(ConfigError, match=r"^precision: .* 'weight' is in fp16; call"):
        engine.set_precision(precision)
    assert engine.decisions.records["precision"].chosen == engine.precision.name == "fp32"


@pytest.mark.parametrize(
    ("dtype", "make", "told"),
    [
        (torch.bfloat16, AdamW, True),
        (torch.bfloat16, partial(torch.optim.SGD, lr=0.1), True),
        (torch.bfloat16, partial(AdamW, masters="remainder"), False),
        (torch.float32, AdamW, False),
    ],
)
def test_bf16_weights_without_masters_are_told_once(dtype, make, told, caplog):
    model = nn.Linear(2, 1).to(dtype)
    engine = Engine(model, make(model.parameters()), precision="bf16")
    engine.set_precision("fp32")
    assert ("weights" in engine.decisions.records) == told
    assert [r.getMessage()[:40] for r in caplog.records if "weights in bf16" in r.getMessage()] == [
        "weights in bf16: 'weight' is, as are 1 m"
    ] * told


def test_fp16_weights_that_the_optimizer_does_not_hold_are_no_reason_to_refuse():
    """As of adapters beside a base in fp16 that is not frozen."""
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
    engine = Engine(model, optimizer, precision="fp16", loss=lambda m, x: m(x).float().mean())
    assert engine.train_step(torch.ones(3, 2)).step == 1


def test_a_step_that_ended_with_an_error_leaves_the_loss_scale_ready(monkeypatch):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = Engine(
        model, optimizer, loss=lambda m, x: m(x).mean(), precision="fp16", compile="off",
        max_skipped=1,
    )  # fmt: skip
    good, bad = torch.ones(3, 2), torch.full((3, 2), torch.nan)
    engine.train_step(good)
    scale = engine.precision.scale
    for _ in range(2):
        with pytest.raises(NumericsError, match="max_skipped=1"):
            engine.train_step(bad)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.train_step(good)
    before = model.weight.detach().clone()
    result = engine.train_step(good)
    assert (result.step, result.skipped, engine.precision.scale) == (2, None, scale)
    assert not torch.equal(model.weight, before)


def test_an_engine_begins_from_the_rate_that_the_optimizer_has():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    halves = Schedule(kind="constant", warmup=2)

    def first_rate(steps=1):
        engine = Engine(
            model, optimizer, loss=lambda m, x: m(x).mean(), schedule=halves, total_steps=4,
            precision="fp32", compile="off",
        )  # fmt: skip
        rates = [engine.train_step(torch.ones(3, 2)).lr for _ in range(steps)]
        return rates[0]

    assert first_rate() == 0.5
    assert first_rate(2) == 0.5, "the rate was what the schedule had made of the base"
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.01
    assert first_rate() == 0.005
    optimizer.load_state_dict(state)
    assert first_rate() == 0.5


@pytest.mark.parametrize("kind", ["fp32", "remainder"])
@pytest.mark.parametrize("steps", [0, 2])
def test_weights_saved_in_fp32_become_the_masters_of_weights_in_bf16(kind, steps, tmp_path):
    """Each of their bits, one that lies between two of bf16 included."""

    def engine(dtype, masters):
        model = nn.Linear(4, 4).to(dtype)
        optimizer = AdamW(model, lr=1e-3, masters=masters)
        return Engine(
            model, optimizer, loss=lambda model, x: model(x).square().mean(), precision="bf16",
            compile="off",
        )  # fmt: skip

    first, second = engine(torch.float32, "none"), engine(torch.bfloat16, kind)
    for _ in range(steps):
        first.train_step(torch.ones(2, 4))
    with torch.no_grad():
        first.model.weight[0, 0] = 1 + 2**-8
    second.load(first.save(tmp_path))
    for _ in range(2):
        exact = second.optimizer.masters(second.model)
        for name, value in first.model.named_parameters():
            assert torch.equal(exact[name], value), name
        second.load(second.save(tmp_path))
    second.train_step(torch.ones(2, 4))


def test_gradients_whose_norm_no_type_holds_skip_the_step() -> None:
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = Engine(model, optimizer, loss=lambda m, b: m(b).mean() * 1e300, precision="fp32")
    found = engine.train_step(torch.ones(2, 4, dtype=torch.float64))
    assert "gradient norm is inf" in (found.skipped or "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_is_exact_however_a_gradient_lies(dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 5)).to(dtype)
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    engine = Engine(
        model, optimizer, loss=lambda m, b: m(b).float().square().sum(), clip=1e-6, compile="off",
        precision="bf16" if dtype == torch.bfloat16 else "fp32",
    )  # fmt: skip
    given = torch.randn(4, 3, 8, 8).to(dtype, memory_format=torch.channels_last)
    found = engine.train_step(given)
    model(given).float().square().sum().backward()  # clipping scaled those of the step
    truth = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
    assert not all(p.grad.is_contiguous() for p in model.parameters())
    assert found.grad_norm == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("kind", ["fp32", "remainder"])
@pytest.mark.parametrize("make", [AdamW, AdamW8bit, torch.optim.AdamW])
def test_masters_of_weights_in_bf16_become_weights_in_fp32(kind, make, tmp_path) -> None:
    """By both names of a tied one."""

    def engine(dtype, make, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        model[1].weight = model[0].weight
        model = model.to(dtype)
        options = {"lr": 1e-4, **options}
        optimizer = make(model.parameters() if make is torch.optim.AdamW else model, **options)
        return Engine(
            model, optimizer, loss=lambda model, x: model(x).square().mean(), precision="bf16",
            compile="off",
        )  # fmt: skip

    source = AdamW8bit if make is AdamW8bit else AdamW
    first = engine(torch.bfloat16, source, masters=kind)
    for _ in range(5):
        first.train_step(torch.randn(2, 64).bfloat16())
    exact = first.optimizer.masters(first.model)["0.weight"]
    path = first.save(tmp_path)
    second = engine(torch.float32, make)
    second.load(path)
    assert torch.equal(second.model[0].weight, exact)
    assert second.model[1].weight is second.model[0].weight
    assert not torch.equal(exact, exact.bfloat16().float())
    second.train_step(torch.randn(2, 64))
    assert {"master", "remainder"}.isdisjoint(second.optimizer.state[second.model[0].weight])
    half = nn.Parameter(exact.half())
    with pytest.raises(ConfigError, match=r"or by Engine\.load into one in float32"):
        AdamW([half]).check_state(half, {"master": exact})
    if make is torch.optim.AdamW:
        other = engine(torch.bfloat16, make)
        with pytest.raises(LeZeroError, match=r"fp32 masters, which torch's AdamW would lose"):
            other.load(path)


class OwnMasters(torch.optim.SGD):
    """Somebody's own optimizer, which calls its state as LeZero's do."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            master = state.setdefault("master", parameter.detach().float().clone())
            state.setdefault("remainder", torch.zeros(3))
            master -= 0.1 * parameter.grad.float()
            parameter.copy_(master)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_of_somebodys_own_are_none_of_our_business(dtype, tmp_path) -> None:
    def engine():
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(dtype)
        return Engine(
            model, OwnMasters(model.parameters(), lr=0.1), compile="off",
            loss=lambda model, x: model(x).float().square().mean(),
            precision="bf16" if dtype == torch.bfloat16 else "fp32",
        )  # fmt: skip

    first, second = engine(), engine()
    first.train_step(torch.ones(2, 4, dtype=dtype))
    second.load(first.save(tmp_path))
    mine, theirs = (e.optimizer.state[e.model.weight] for e in (first, second))
    assert torch.equal(mine["master"], theirs["master"])
    assert torch.equal(second.model.weight, first.model.weight)
