"""Parameter groups, AdamW and schedules."""

import itertools
import math

import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.optim import AdamW, AdamW8bit, Schedule, decayed_names, parameter_groups


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.line = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


def test_norms_biases_embeddings_and_tied_heads_are_not_decayed():
    model = Model()
    assert decayed_names(model) == {"line.weight"}
    groups = parameter_groups(model, 0.1)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    held = [p for g in groups for p in g["params"]]
    assert len(held) == 5
    assert all(p.requires_grad for p in held)


def test_bags_of_embeddings_scales_and_wide_biases_are_not_decayed():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.line = nn.EmbeddingBag(7, 4), nn.Linear(4, 4)
            self.gain = nn.Parameter(torch.ones(4))
            self.bias = nn.Parameter(torch.zeros(3, 4))

    assert decayed_names(Own()) == {"line.weight"}


def test_adamw_equals_torch():
    torch.manual_seed(0)
    a = nn.Linear(5, 3)
    b = nn.Linear(5, 3)
    b.load_state_dict(a.state_dict())
    mine, theirs = (
        AdamW(a.parameters(), lr=0.1),
        torch.optim.AdamW(b.parameters(), lr=0.1, foreach=False),
    )
    x = torch.randn(4, 5)
    for _ in range(5):
        for model, optimizer in ((a, mine), (b, theirs)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert mine.defaults["fused"]
    torch.testing.assert_close(a.weight, b.weight)


@pytest.mark.parametrize("make", [AdamW, AdamW8bit])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lr", -1, "lr: got -1, allowed is a number from 0"),
        ("lr", "3e-4", "lr: got '3e-4', allowed is a number from 0"),
        ("lr", float("nan"), "lr: got nan"),
        ("lr", None, "lr: got None"),
        ("eps", -1e-8, "eps: got -1e-08"),
        ("weight_decay", -0.1, "weight_decay: got -0.1"),
        ("betas", (0.9, 1), r"betas\[1\]: got 1, allowed is a number from 0 and below 1"),
        ("betas", 0.9, "betas: got 0.9, allowed are two numbers"),
    ],
)
def test_options_out_of_range_are_named(make, name, value, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        make(nn.Linear(2, 2), **{name: value})


def test_a_learning_rate_may_be_a_tensor():
    assert AdamW(nn.Linear(2, 2), lr=torch.tensor(0.1)).param_groups[0]["lr"] == 0.1


def test_nothing_to_train():
    model = Model()
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        AdamW(model)


@pytest.mark.parametrize("make", [AdamW, AdamW8bit])
@pytest.mark.parametrize("given", ["parameters", "named_parameters"])
def test_parameters_of_a_group_may_be_a_generator(make, given):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    body, head, later = (getattr(part, given) for part in model)
    optimizer = make([{"params": body(), "lr": 0.1}, {"params": head()}])
    optimizer.add_param_group({"params": later()})
    before = [p.clone() for p in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("make", [AdamW, AdamW8bit])
def test_a_group_may_be_empty_but_not_all_of_them(make):
    weight = nn.Parameter(torch.ones(2))
    optimizer = make([{"params": iter(())}, {"params": weight}])
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]
    weight.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(ConfigError, match="no trainable parameter"):
        make([{"params": iter(())}, {"params": []}])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_schedules_warm_up_stay_in_range_and_end_at_final(kind):
    schedule = Schedule(kind=kind, warmup=10, final=0.05)
    factors = [schedule.factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[-1] == pytest.approx(1.0 if kind == "constant" else 0.05)
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(factors[10:]))
    if kind == "wsd":
        assert factors[10:80] == [1.0] * 70
        assert factors[80] < 1


def test_a_cosine_is_half_a_cosine():
    schedule = Schedule(kind="cosine", warmup=20, final=0.1)
    for along in (0.25, 0.5, 0.75):
        found = schedule.factor(19 + round(80 * along), 100)
        assert found == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * along)))


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_steps_after_the_last_keep_the_final_rate(kind):
    schedule = Schedule(kind=kind, warmup=10, final=0.05)
    assert [schedule.factor(step, 100) for step in (99, 100, 150, 10_000)] == pytest.approx(
        [0.05] * 4
    )


def test_schedule_bad_values():
    with pytest.raises(ConfigError, match="kind: got 'cosin'"):
        Schedule(kind="cosin")
    with pytest.raises(ConfigError, match="belongs to kind 'wsd'"):
        Schedule(kind="linear", decay=0.5)
    with pytest.raises(ConfigError, match="warmup"):
        Schedule(warmup=-1)


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
def test_each_group_has_options_of_its_own(kind):
    own = {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.3}
    make = torch.Generator().manual_seed(0)
    mine, theirs = ([nn.Parameter(torch.ones(8)) for _ in range(2)] for _ in range(2))
    optimizers = [
        made([{"params": held[:1]}, {"params": held[1:], **own}], lr=1e-3, **more)
        for made, held, more in (
            (kind, mine, {"masters": "fp32"}),
            (torch.optim.AdamW, theirs, {}),
        )
    ]
    for _ in range(3):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn(8, generator=make)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("masters", ["fp32", "remainder"])
def test_weights_of_32_bits_beside_shorter_ones_keep_no_master(masters):
    weights = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8).bfloat16())]
    optimizer = AdamW(weights, masters=masters)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    long, short = (set(optimizer.state[weight]) for weight in weights)
    assert long == {"step", "exp_avg", "exp_avg_sq"}
    assert len(short - long) == 1
