"""Optimizers inside of an optimizer, whose state `optimizer.state` does not show."""

import copy
import json

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.checkpoint import pack_optimizer, unpack_optimizer
from lezero.core.errors import FileError
from lezero.parallel.zero import Zero, shard_, sharding_of
from lezero.train import Engine


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


def test_an_optimizer_that_does_not_show_its_state_is_told_at_once(tmp_path, caplog):
    engine = started(Closed)
    assert "Closed.state_dict() could not be read (not consolidated)" in caplog.text
    engine.train_step(torch.randn(5, 4))
    engine.load(engine.save(tmp_path))


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
