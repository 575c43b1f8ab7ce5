"""Optimizers of torch under the engine: sparse gradients, late parameters, what cannot work."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lezero.core.errors import ConfigError
from lezero.optim import Schedule
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


def test_an_optimizer_that_asks_for_the_loss_itself_is_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"^optimizer: LBFGS asks for the loss several times"):
        Engine(model, torch.optim.LBFGS(model.parameters()))
