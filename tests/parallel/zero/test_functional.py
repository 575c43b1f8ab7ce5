"""`functional_call` computes with the tensors given, and leaves a sharded model's alone."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn
from torch.func import functional_call, grad, vmap

from lezero.core import groups
from lezero.core.errors import OrderError
from lezero.parallel.zero import Zero, full_state_dict, shard_
from tests.parallel.zero.models import Tiny, batches, loss_of, make, whole

LAST = "norm.bias"


def functional():
    wrong = []
    for stage in range(4):
        plain, model = make(), shard_(make(), Zero(stage=stage))
        tokens, before = next(batches(1)), whole(model)
        halves = {name: value.detach() / 2 for name, value in plain.named_parameters()}
        parameters = {name: nn.Parameter(value) for name, value in halves.items()}
        one = {"blocks.1.up.weight": parameters["blocks.1.up.weight"]}
        for given in (halves, parameters, one):
            with torch.no_grad():
                expected = functional_call(plain, given, (tokens,))
                for _ in range(2):
                    if not torch.equal(functional_call(model, given, (tokens,)), expected):
                        wrong.append(f"stage {stage}: {len(given)} {type(given)} given")
        slopes = [
            torch.autograd.grad(functional_call(each, one, (tokens,)).square().mean(), one.values())
            for each in (plain, model)
        ]
        torch.testing.assert_close(*slopes)
        zero = {"embed.weight": model.embed.weight.detach() * 0}
        if stage and groups.world_size() > 1:
            with pytest.raises(OrderError, match=r"'embed.weight' is split .* whole tensors"):
                functional_call(model, zero, (tokens,))
        else:
            assert not functional_call(model, zero, (tokens,)).any()
        now = whole(model)
        wrong += [name for name in before if not torch.equal(before[name], now[name])]
        torch.testing.assert_close(loss_of(model, tokens), loss_of(plain, tokens))
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_functional_call_leaves_the_weights_alone(ranks, world):
    assert ranks(world, functional) == [[]] * world


def replaced():
    torch.manual_seed(5)
    other, model, tokens = Tiny(), shard_(make(), Zero(stage=0)), next(batches(1))
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(model(tokens), other(tokens))
    model.norm.weight = nn.Parameter(torch.zeros_like(model.norm.weight))
    model.norm.bias = nn.Parameter(torch.zeros_like(model.norm.bias))
    assert not model(tokens).any()
    return {name: value.numpy() for name, value in full_state_dict(model).items()}


def test_a_replaced_parameter_is_taken_over(ranks):
    first, _ = ranks(2, replaced)
    assert not first["norm.weight"].any()


def transformed():
    """Every stage is refused, and goes on as if it had not been asked."""
    said = []
    for stage in range(4):
        plain, model, tokens = make(), shard_(make(), Zero(stage=stage)), next(batches(1))
        given = {name: value.detach() for name, value in plain.named_parameters()}

        def loss(parameters, model=model, tokens=tokens):
            return functional_call(model, parameters, (tokens,)).square().mean()

        for transform in (
            grad(loss),
            grad(lambda p, loss=loss: vmap(lambda _: loss(p))(p[LAST])[0]),
        ):
            with pytest.raises(OrderError) as error:
                transform(given)
            said.append(str(error.value))

        leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
        slopes = torch.autograd.grad(loss(leaves), leaves.values())
        expected = grad(lambda p, m=plain, x=tokens: functional_call(m, p, (x,)).square().mean())
        torch.testing.assert_close(dict(zip(leaves, slopes, strict=True)), expected(given))
    return said


def test_a_transform_around_a_sharded_model_is_refused_with_what_to_call_instead(ranks):
    for said in ranks(2, transformed):
        assert len(said) == 8
        assert all("call torch.autograd.grad on what the model" in text for text in said)
