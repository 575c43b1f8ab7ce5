"""Optimizers inside of an optimizer, whose state `optimizer.state` does not show."""

import copy
import json
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from safetensors.torch import load_file
from torch import nn

from lezero.checkpoint import export_weights, pack_optimizer, unpack_optimizer
from lezero.core.errors import FileError
from lezero.optim import AdamW
from lezero.parallel.zero import Zero, shard_, sharding_of
from lezero.train import Engine

FP32 = torch.float32


class Both(torch.optim.Optimizer):
    def __init__(self, model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        self.a = torch.optim.Muon(matrices, lr=1e-2)
        self.of = {"b": torch.optim.AdamW(others, lr=1e-2)}
        super().__init__([{"params": matrices}, {"params": others}], {"lr": 1e-2})
        self.param_groups = self.a.param_groups + self.of["b"].param_groups

    def step(self, closure=None):
        self.a.step()
        self.of["b"].step()

    def state_dict(self):
        return {"a": self.a.state_dict(), "b": self.of["b"].state_dict()}


class Lookahead(torch.optim.Optimizer):
    """Groups of its own, slow weights in its state, and a counter where no save looks."""

    def __init__(self, inner):
        super().__init__([{"params": g["params"]} for g in inner.param_groups], {"lr": 1.0})
        self.inner, self.count, self.hidden = inner, 0, []

    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p.detach(), 0.5)
                if self.count % 2 == 0:
                    p.data.copy_(slow)

    def state_dict(self):
        own = super().state_dict()
        return {**own, "inner": self.inner.state_dict(), "count": self.count, "more": self.hidden}


class Closed(Both):
    def state_dict(self):
        raise RuntimeError("not consolidated")


def started(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    return Engine(
        model, make(model), loss=lambda m, x: m(x).square().mean(), compile="off", precision="fp32"
    )


def steps(engine, count):
    torch.manual_seed(engine.step)
    return [engine.train_step(torch.randn(5, 4)).loss for _ in range(count)]


def adamw(model, lr=0.01):
    return torch.optim.AdamW(model.parameters(), lr=lr)


MAKERS = {
    "two in one": Both,
    "lookahead": lambda model: Lookahead(adamw(model)),
    "lookahead of two": lambda model: Lookahead(Both(model)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, caplog, name):
    engine = started(MAKERS[name])
    steps(engine, 4)
    engine.save(tmp_path)
    other = started(MAKERS[name])
    other.load(tmp_path)
    assert ("['count'] is neither in its groups" in caplog.text) is (name != "two in one")
    assert caplog.text.count("leave out") == 2 * (name != "two in one")
    assert steps(engine, 4) == steps(other, 4)
    assert all(map(torch.equal, engine.model.parameters(), other.model.parameters()))


def test_what_a_wrapper_keeps_where_no_save_looks_is_told_at_the_first_save(tmp_path, caplog):
    engine = started(lambda model: Lookahead(adamw(model)))
    assert "['more']" not in caplog.text
    engine.optimizer.hidden.append(torch.ones(3))
    for _ in range(2):
        engine.save(tmp_path)
    assert caplog.text.count("Lookahead.state_dict()['more'][0] is neither") == 1


def test_an_optimizer_that_does_not_show_its_state_is_told_at_the_first_save(tmp_path, caplog):
    engine = started(Closed)
    assert not caplog.text
    engine.train_step(torch.randn(5, 4))
    engine.load(engine.save(tmp_path))
    assert "Closed.state_dict() could not be read (not consolidated)" in caplog.text


def test_a_rate_of_the_inner_optimizer_alone_is_told(tmp_path, caplog):
    started(lambda model: Lookahead(adamw(model))).save(tmp_path)
    started(lambda model: Lookahead(adamw(model, lr=0.02))).load(tmp_path)
    assert "AdamW inside of the optimizer (inner) is given lr=0.02 and goes on" in caplog.text


def packed():
    engine = started(Both)
    steps(engine, 1)
    names = dict(engine.model.named_parameters())
    tensors, document = pack_optimizer(engine.optimizer, names)
    return engine.optimizer, names, tensors, json.loads(json.dumps(document))


def test_names_of_inner_state_and_an_old_checkpoint_without_it(caplog):
    optimizer, names, tensors, document = packed()
    assert "optimizer/.inner/a/0.weight/momentum_buffer" in tensors
    assert "optimizer/.inner/of.b/0.bias/exp_avg" in tensors
    del document["inner"]
    unpack_optimizer(optimizer, names, {}, document)
    assert "without the state of the optimizers inside of Both (a, of.b)" in caplog.text


@pytest.mark.parametrize("broken", ["place", "class", "tensor", "kind"])
def test_inner_state_that_does_not_fit_changes_nothing(broken):
    optimizer, names, tensors, document = packed()
    if broken == "place":
        document["inner"]["c"] = document["inner"].pop("of.b")
    elif broken == "class":
        document["inner"]["of.b"]["class"] = "SGD"
    elif broken == "tensor":
        del tensors["optimizer/.inner/of.b/0.bias/exp_avg"]
    else:
        document["inner"]["of.b"] = 3
    document["groups"][0]["options"]["lr"] = 7.0
    before = copy.deepcopy(optimizer.a.state_dict())
    with pytest.raises(FileError):
        unpack_optimizer(optimizer, names, tensors, document)
    assert optimizer.a.param_groups[0]["lr"] == before["param_groups"][0]["lr"] == 0.01


class Mean(Lookahead):
    """What its state_dict shows is there after the first step only."""

    def step(self, closure=None):
        super().step()
        self.mean = 1

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "mean": self.mean}


class Stacked(Lookahead):
    def state_dict(self):
        slow = [self.state[p]["slow"].sum() for p in self.param_groups[0]["params"] if self.state]
        return {"inner": self.inner.state_dict(), "slow": torch.stack(slow)}


@pytest.mark.parametrize("kind", [Mean, Stacked])
def test_a_class_that_shows_its_state_after_a_step_loads_into_a_fresh_process(
    tmp_path, kind, caplog
):
    engine = started(lambda model: kind(adamw(model)))
    assert not caplog.text
    steps(engine, 2)
    engine.save(tmp_path)
    other = started(lambda model: kind(adamw(model)))
    other.load(tmp_path)
    assert steps(engine, 3) == steps(other, 3)


class Late(torch.optim.Optimizer):
    """Makes the optimizer that it needs in its first step."""

    inner = None

    def step(self, closure=None):
        if self.inner is None:
            self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.inner.step()


def test_one_that_is_made_in_the_first_step_begins_anew_and_is_told(tmp_path, caplog):
    engine = started(lambda model: Late(model.parameters(), {"lr": 0.1}))
    steps(engine, 2)
    engine.save(tmp_path)
    other = started(lambda model: Late(model.parameters(), {"lr": 0.1}))
    other.load(tmp_path)
    assert "optimizers inside of Late that are not there (inner) and begin anew" in caplog.text
    assert other.step == 2
    assert all(map(torch.equal, engine.model.parameters(), other.model.parameters()))
    engine.load(tmp_path)  # where it is there, it goes on
    assert engine.optimizer.inner.state[engine.model[0].weight]["momentum_buffer"].any()


class Each(torch.optim.Optimizer):
    """One optimizer a parameter, by the parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})
        self.of = {p: torch.optim.AdamW([p], lr=0.01) for p in self.param_groups[0]["params"]}

    def step(self, closure=None):
        for each in self.of.values():
            each.step()


def test_optimizers_by_parameter_go_on_bit_for_bit(tmp_path, caplog):
    engine = started(lambda model: Each(model.parameters()))
    steps(engine, 3)
    engine.save(tmp_path)
    other = started(lambda model: Each(model.parameters()))
    other.load(tmp_path)
    assert steps(engine, 3) == steps(other, 3)
    tensors, _ = pack_optimizer(engine.optimizer, dict(engine.model.named_parameters()))
    assert "optimizer/.inner/of.0.weight/0.weight/exp_avg" in tensors
    assert not caplog.text


@dataclass
class Box:
    held: torch.optim.Optimizer


@pytest.mark.parametrize(
    ("hide", "where"),
    [(lambda inner: {("a", 1): inner}, "inner.tuple"), (Box, "inner.held")],
)
def test_an_optimizer_where_no_name_leads_is_told_at_once(caplog, hide, where):
    def make(model):
        made = Late(model.parameters(), {"lr": 0.1})
        made.inner = hide(adamw(model))
        return made

    started(make)
    assert f"AdamW at {where} inside of Late holds parameters of the model" in caplog.text


class Wrapper(torch.optim.Optimizer):
    def __init__(self, model):
        self.b = AdamW(model, lr=1e-3, masters="fp32" if model[0].weight.dtype != FP32 else "none")
        super().__init__(self.b.param_groups, {})

    def step(self, closure=None):
        self.b.step()


def engine(kind, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8)).to(dtype)
    return Engine(
        model, kind(model), loss=lambda m, x: m(x).square().mean(), precision="bf16", compile="off"
    )


def test_masters_of_an_inner_optimizer_are_exported_and_become_weights_in_fp32(tmp_path):
    first = engine(Wrapper, torch.bfloat16)
    for _ in range(3):
        first.train_step(torch.randn(2, 8).bfloat16())
    exact = first.optimizer.b.masters(first.model)
    assert not torch.equal(exact["0.weight"], exact["0.weight"].bfloat16().float())
    path = first.save(tmp_path / "run")
    export_weights(path, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    second = engine(Wrapper, FP32)
    second.load(path)
    for name, weight in second.model.named_parameters():
        assert torch.equal(weight, exact[name])
        assert torch.equal(exported[name], exact[name])
        kept = second.optimizer.b.state[weight]
        assert kept["exp_avg"].any()
        assert "master" not in kept


class Begun(Wrapper):
    """What its state_dict shows is there after the first step only."""

    count = 0

    def step(self, closure=None):
        super().step()
        self.count += 1

    def state_dict(self):
        if not self.count:
            raise RuntimeError("not begun")
        return self.b.state_dict()


@pytest.mark.parametrize("kind", [Wrapper, Begun])
def test_weights_in_fp32_become_the_masters_of_an_inner_optimizer(tmp_path, kind):
    first = engine(kind, FP32)
    first.train_step(torch.randn(2, 8))
    second = engine(kind, torch.bfloat16)
    second.load(first.save(tmp_path))
    exact = second.optimizer.b.masters(second.model)
    for name, weight in first.model.named_parameters():
        assert not torch.equal(weight, weight.bfloat16().float())
        assert torch.equal(exact[name], weight)


class Pair(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.parts = [torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in parameters]
        super().__init__([{"params": part.param_groups[0]["params"]} for part in self.parts], {})
        self.param_groups = [part.param_groups[0] for part in self.parts]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return super().forward(x) * self.scale


def sharded(folder, saves):
    """Moments of each parameter, whole."""
    torch.manual_seed(saves)
    model = shard_(Scaled(), Zero(stage=3))
    engine = Engine(
        model, Pair(model.parameters()), loss=lambda m, x: m(x).square().mean(), compile="off"
    )
    if saves:
        engine.train_step(torch.randn(3, 4))
        engine.save(folder)
    else:
        engine.load(folder)
    found = [
        part.state[p]["exp_avg"].full_tensor().tolist()
        for part, p in zip(engine.optimizer.parts, model.parameters(), strict=True)
    ]
    engine.train_step(torch.randn(3, 4))
    sharding_of(model).close()
    return found


def test_inner_state_of_shards_loads_at_another_number_of_ranks(ranks, tmp_path):
    saved = ranks(2, sharded, tmp_path, True)
    assert saved[0] == saved[1]
    assert ranks(3, sharded, tmp_path, False) == [saved[0]] * 3
