"""The adapter of FSDP2, as far as it runs on a CPU: like one process, with the same face."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch.distributed.tensor import DTensor

from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.errors import ConfigError, OrderError
from lezero.parallel.zero import Zero, clip_grad_norm_, fsdp, no_sync, shard_, sharding_of
from tests.parallel.zero.models import WIDTH, Vectors, batches, loss_of, make, whole
from tests.parallel.zero.test_experts import Experts
from tests.parallel.zero.test_models import differences, gradients_of


def train(steps, axes=None):
    fsdp.fits = lambda *_: True
    mesh = Mesh(axes) if axes else None
    model = shard_(make(Vectors, torch.float64), Zero(stage=3), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses, norms = [], []
    for tokens in batches(steps, groups.world_size(), groups.rank()):
        *parts, last = tokens.chunk(2)
        with no_sync(model):
            first = loss_of(model, parts[0]) / 2
            first.backward()
        second = loss_of(model, last) / 2
        second.backward()
        norms.append(float(clip_grad_norm_(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append((first + second).detach())
    mean = groups.all_reduce_sum(torch.stack(losses)) / groups.world_size()
    sharding = sharding_of(model)
    part = sharding.layout["embed.weight"]
    assert sharding.local("embed.weight").shape[0] == part.stop - part.start
    return mean.tolist(), norms, whole(model), len(sharding.units)


@pytest.mark.parametrize(("world", "axes"), [(2, None), (4, {"replicate": 2, "shard": 2})])
def test_like_one_process(ranks, world, axes):
    plain = make(Vectors, torch.float64)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    losses, norms, found, units = ranks(world, train, 4, axes)[1]
    assert units == 4
    for step, tokens in enumerate(batches(4)):
        loss = loss_of(plain, tokens)
        loss.backward()
        norm = clip_grad_norm_(plain, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-10)
        assert norms[step] == pytest.approx(norm.item(), rel=1e-9)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-10)


def loaded():
    fsdp.fits = lambda *_: True
    torch.manual_seed(7)
    state = Vectors().state_dict()
    model = shard_(make(Vectors), Zero(stage=3))
    assert type(sharding_of(model)) is fsdp.FsdpSharding
    model.load_state_dict(state)
    return whole(model), state


def test_whole_weights_load_into_shards(ranks):
    for found, state in ranks(2, loaded):
        assert all(torch.equal(value, state[name]) for name, value in found.items())


def registered():
    """Parameters put in place of others, before the first forward and after it."""
    fsdp.fits = lambda *_: True
    model, plain = shard_(make(Vectors, torch.float64), Zero(stage=3)), make(Vectors, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens in batches(2):
        for one in (model, plain):
            one.norm.weight = torch.nn.Parameter(one.norm.weight.detach() * 0.5)
            up = one.blocks[1].up
            up.weight = torch.nn.Parameter(up.weight.detach() * 2)
        lost = torch.optim.SGD([model.norm.weight], lr=0.1)
        steps = torch.optim.SGD(plain.parameters(), lr=0.1), optimizer
        for one, step in zip((plain, model), steps, strict=True):
            loss_of(one, tokens).backward()
            step.step()
            step.zero_grad()
        now = whole(model)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(now[name], parameter.detach())
        with pytest.raises(OrderError, match=r"no longer in the model \('norm.weight'"):
            lost.step()
    model.norm.weight = torch.nn.Parameter(plain.norm.weight.detach())
    with pytest.raises(OrderError, match=r"'norm.weight' was replaced after sharding by one"):
        model(tokens)


def test_a_replaced_parameter_is_taken_over(ranks):
    ranks(2, registered)


def functional():
    fsdp.fits = lambda *_: True
    model, plain = shard_(make(Vectors), Zero(stage=3)), make(Vectors)
    tokens = next(batches(1))
    for named in ("scale", "blocks.1.up.weight"):
        given = {named: plain.get_parameter(named).detach() * 0}
        own = {named: torch.nn.Parameter(given[named])}
        for values in (given, own, {named: model.get_parameter(named).detach() * 0}):
            with pytest.raises(OrderError, match=f"computes with its own '{named}'"):
                torch.func.functional_call(model, values, (tokens,))
    for one in (model, plain):
        loss_of(one, tokens).backward()
    assert not list(differences(gradients_of(model), gradients_of(plain)))


def test_functional_call_is_refused_and_leaves_the_model_whole(ranks):
    ranks(2, functional)


def evaluated():
    """Forwards without a backward, before the optimizer is built, before a load, before a step."""
    fsdp.fits = lambda *_: True
    model, plain = shard_(make(Vectors, torch.float64), Zero(stage=3)), make(Vectors, torch.float64)
    tokens = next(batches(1))
    losses = [loss_of(model, tokens).item()]
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for one in (model, plain):
        loss_of(one, tokens).backward()
    with torch.no_grad():
        losses.append(loss_of(model, tokens).item())
    for optimizer in optimizers:
        optimizer.step()
    assert losses == pytest.approx([loss_of(make(Vectors, torch.float64), tokens).item()] * 2)
    assert loss_of(model, tokens).item() == pytest.approx(loss_of(plain, tokens).item(), rel=1e-10)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_after_a_forward_without_a_backward_every_parameter_is_a_shard(ranks):
    ranks(2, evaluated)


class Sizes(Experts):
    """Of which FSDP2 takes everything; experts of one size and, in one block, of several."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.never = torch.nn.Parameter(torch.ones(WIDTH))
        self.blocks[1].experts[2] = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 5), torch.nn.Linear(5, WIDTH)
        )


def chosen(axes):
    """The ranks' gradients, with two backwards in a step and with one collected before."""
    fits, found = fsdp.fits, []
    for use in (lambda *_: True, fits):
        fsdp.fits = use
        mesh = Mesh(axes) if axes else None
        model = shard_(make(Sizes, torch.float64), Zero(stage=3), mesh=mesh)
        for step, tokens in enumerate(batches(4, groups.world_size(), groups.rank())):
            with no_sync(model) if step == 2 else contextlib.nullcontext():
                model.choose(groups.rank(), step)
                loss_of(model, tokens).backward()
            if step != 2:
                found.append(gradients_of(model))
            if step == 0:
                model.zero_grad()
    return [one for k in range(3) for one in differences(found[k], found[k + 3])], found[0]


@pytest.mark.parametrize(("world", "axes"), [(2, None), (4, {"replicate": 2, "shard": 2})])
def test_ranks_may_use_different_parameters(ranks, world, axes):
    for wrong, first in ranks(world, chosen, axes, timeout_s=60):
        assert wrong == []
        assert first["never"] is None
        assert first["bias"] is not None


def in_two_types(kind):
    """Gradients in bf16 and in fp32: collected under no_sync before, or of what was frozen."""
    fsdp.fits, found = lambda *_: True, []
    for compute in ("bf16", "auto"):
        model = make(Sizes).requires_grad_(kind != "frozen")
        shard_(model, Zero(stage=3, compute=compute))
        for step, tokens in enumerate(batches(2, groups.world_size(), groups.rank())):
            model.choose(groups.rank(), step)
            if kind == "frozen" and step == 0:
                loss_of(model, tokens)
                model.requires_grad_()
                continue
            with no_sync(model) if step == 0 else contextlib.nullcontext():
                loss_of(model, tokens).backward()
        found.append(gradients_of(model))
    low, full = found
    for name, gradient in full.items():
        assert (gradient is None) == (low[name] is None), name
        if gradient is not None:
            assert low[name].dtype is torch.float32
            torch.testing.assert_close(low[name], gradient, rtol=0.05, atol=5e-3)


@pytest.mark.parametrize("kind", ["collected", "frozen"])
def test_sums_in_16_bits_are_wide_whatever_was_used_and_trained_before(ranks, kind):
    ranks(2, in_two_types, kind)


def choices():
    cuda, mesh = torch.device("cuda"), Mesh({"shard": 2})
    model = make(Vectors)
    with torch.device("meta"):
        meta = Vectors()
    return [
        fsdp.fits(model, Zero(stage=3), Wire(), mesh, cuda),
        fsdp.fits(model, Zero(stage=2), Wire(), mesh, cuda),
        fsdp.fits(make(), Zero(stage=3), Wire(), mesh, cuda),
        fsdp.fits(meta, Zero(stage=3), Wire(), mesh, cuda),
        fsdp.fits(model, Zero(stage=3), Wire(codec="int8"), mesh, cuda),
        fsdp.fits(model, Zero(stage=3), Wire(), mesh, torch.device("cpu")),
    ]


def test_when_it_is_used(ranks):
    assert ranks(2, choices) == [[True, False, False, False, False, False]] * 2


def of_types(kind):
    """Vectors of fp32 with parts in bf16."""
    model = make(Vectors)
    {
        "a norm in a block": lambda: model.blocks[1].norm.bfloat16(),
        "a part of the root": lambda: model.norm.bfloat16(),
        "a frozen norm": lambda: model.blocks[1].norm.bfloat16().requires_grad_(False),
        "blocks": lambda: model.blocks.bfloat16(),
    }[kind]()
    return model


def fits_types(kind):
    """Whether FSDP2 is asked, and that it can."""
    zero, mesh = Zero(stage=3, compute="bf16"), Mesh({"shard": 2})
    found = fsdp.fits(of_types(kind), zero, Wire(), mesh, torch.device("cuda"))
    if found:
        fsdp.fits = lambda *_: True
        model = shard_(of_types(kind), zero)
        optimizer = torch.optim.AdamW(model.parameters())
        for tokens in batches(2):
            loss_of(model, tokens).backward()
            optimizer.step()
        assert all(value.isfinite().all() for value in whole(model).values())
    return found


@pytest.mark.parametrize(
    ("kind", "used"),
    [
        ("a norm in a block", False),
        ("a part of the root", False),
        ("a frozen norm", True),
        ("blocks", True),
    ],
)
def test_which_mixed_types_it_takes(ranks, kind, used):
    assert ranks(2, fits_types, kind) == [used, used]


def block_first():
    fsdp.fits = lambda *_: True
    model, plain = shard_(make(Vectors, torch.float64), Zero(stage=3)), make(Vectors, torch.float64)
    x, tokens = torch.ones(2, WIDTH, dtype=torch.float64), next(batches(1))
    for one in (model, plain):
        one.blocks[1](x).sum().backward()
        loss_of(one, tokens).backward()
    assert not list(differences(gradients_of(model), gradients_of(plain)))


def test_a_block_may_be_called_before_the_model(ranks):
    ranks(2, block_first)


def misuse():
    fsdp.fits = lambda *_: True
    model = shard_(make(Vectors), Zero(stage=3))
    tokens = next(batches(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with no_sync(model):
        loss_of(model, tokens).backward()
    with pytest.raises(OrderError, match="collected under no_sync and are not reduced"):
        optimizer.step()
    loss_of(model, tokens).backward()
    optimizer.step()
    for kind, told in {
        torch.optim.LBFGS: r"LBFGS needs whole parameters .*\(stage 3\)",
        torch.optim.Adafactor: r"Adafactor cannot work on the shards of stage 3, as of 'scale'",
    }.items():
        with pytest.raises(ConfigError, match=told):
            kind(model.parameters()).step(lambda: 0.0)


def test_misuse_is_told(ranks):
    ranks(2, misuse)


def one_after_the_other(given):
    fsdp.fits = lambda *_: True
    found = []
    for _ in range(2):
        mesh = Mesh({"shard": 2}) if given else None
        model = shard_(make(Vectors), Zero(stage=3), mesh=mesh)
        found.append(whole(model)["embed.weight"])
        sharding_of(model).close()
        if mesh is not None:
            torch.distributed.all_reduce(torch.ones(1), group=mesh.group("shard"))
    return found


@pytest.mark.parametrize("given", [False, True])
def test_a_closed_model_leaves_the_next_one_its_groups(ranks, given):
    for first, second in ranks(2, one_after_the_other, given):
        assert torch.equal(first, second)
