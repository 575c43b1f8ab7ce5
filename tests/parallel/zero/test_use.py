"""What a sharded model can be used for, and how misuse is told."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import groups, ledger
from lezero.core.errors import ConfigError, DistributedError, OrderError
from lezero.parallel.zero import (
    Zero,
    clip_grad_norm_,
    grad_norm,
    no_sync,
    probe,
    shard_,
    sharding_of,
)
from tests.parallel.zero.models import Tiny, batches, loss_of, make, plain_losses, whole


def hybrid(stage):
    model = shard_(
        make(dtype=torch.float64), Zero(stage=stage), mesh=Mesh({"replicate": 2, "shard": 2})
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for tokens in batches(6, 4, groups.rank()):
        loss = loss_of(model, tokens)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    rows = sharding_of(model).local("embed.weight").shape[0]
    return (groups.all_reduce_sum(torch.stack(losses)) / 4).tolist(), whole(model), rows


@pytest.mark.parametrize("stage", [1, 3])
def test_split_inside_pairs_and_replicated_across(ranks, stage):
    expected, parameters = plain_losses(6, max_norm=0.5)
    for rank, (losses, found, rows) in enumerate(ranks(4, hybrid, stage)):
        assert losses == pytest.approx(expected, rel=1e-10, abs=0)
        assert rows == (10, 9)[rank % 2]
        for name, value in parameters.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10)


def evaluation():
    found = []
    for stage in range(4):
        model = shard_(make(), Zero(stage=stage))
        tokens = next(batches(1))
        with torch.no_grad():
            first = model(tokens)
            for parameter in model.parameters():  # changed by hand, in place
                parameter.mul_(0.5)
            second = model(tokens)
            state = {name: value.clone() for name, value in model.state_dict().items()}
            for parameter in model.parameters():
                parameter.zero_()
            model.load_state_dict(state)
            third = model(tokens)
            model.load_state_dict(state, assign=True)
            fourth = model(tokens)
        with torch.inference_mode():
            fifth = model(tokens)
        found.append((first, second, third, fourth, fifth))
    return found


def test_evaluation_and_changes_by_hand(ranks):
    plain, tokens = make(), next(batches(1))
    with torch.no_grad():
        first = plain(tokens)
        for parameter in plain.parameters():
            parameter.mul_(0.5)
        second = plain(tokens)
    for outputs in ranks(2, evaluation)[1]:
        for output, expected in zip(outputs, (first, *[second] * 4), strict=True):
            torch.testing.assert_close(output, expected)


def trained_after_inference():
    """Losses of two steps of which the first follows an evaluation in inference mode."""
    found = []
    for stage in range(4):
        for wire in (Wire(), Wire(codec="int8", gather="int8")):
            losses = []
            for first in (False, True):
                model = shard_(make(), Zero(stage=stage, compute="bf16"), wire=wire)
                if first:
                    with torch.inference_mode():
                        model(next(batches(1)))
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                for tokens in batches(2, 2, groups.rank()):
                    loss = loss_of(model, tokens)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(float(loss.detach()))
                sharding_of(model).close()
            found.append(losses)
    return found


def test_inference_mode_before_the_first_step_changes_nothing(ranks):
    for losses in ranks(2, trained_after_inference)[0]:
        assert losses[:2] == losses[2:]


def strided():
    """Parameters that are not contiguous, with an optimizer that walks through memory."""
    found = []
    for stage in (None, 0, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
        model.to(memory_format=torch.channels_last)
        if stage is not None:
            shard_(model, Zero(stage=stage))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(2):
            images = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(step))
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_strides_of_parameters_are_those_of_their_gradients(ranks, world):
    plain, *others = ranks(world, strided)[0]
    for other in others:
        for name, value in plain.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


def converted():
    tokens = next(batches(1))
    for stage in range(4):
        model = shard_(make(), Zero(stage=stage))
        first = model(tokens)
        model.float()  # which they are
        model.to("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(model, tokens).backward()
        optimizer.step()
        assert not torch.equal(first, model(tokens))
        model.double()
        with pytest.raises(OrderError, match=r"was torch.float32 then\); convert or move"):
            model(tokens)
        if stage:
            model.float()  # right again, but in other memory than gathers read
            with pytest.raises(OrderError, match=r"other memory than lz.shard_ gave it"):
                model(tokens)


def test_conversion_after_sharding_is_refused(ranks):
    ranks(2, converted)


def around():
    """Parts of a block, and parameters by themselves, where nothing is split."""
    model = shard_(make(), Zero(stage=0))
    weight = model.blocks[0].up.weight
    loss_of(model, next(batches(1, 2, groups.rank()))).backward()
    before = weight.grad.clone()
    (model.blocks[0].up(torch.full((1, 12), 1.0 + groups.rank())).sum() + weight.sum()).backward()
    added = weight.grad - before
    (alone,) = torch.autograd.grad(weight.square().sum(), weight)
    torch.testing.assert_close(alone, 2 * weight)
    torch.testing.assert_close(weight.grad, before + added)
    return added


def test_gradients_are_reduced_whichever_way_they_came(ranks):
    for added in ranks(2, around):
        torch.testing.assert_close(added, torch.full((24, 12), 2.5))


def generation():
    from lezero.models import Transformer, TransformerConfig, generate

    config = TransformerConfig(vocab=32, dim=16, layers=3, heads=2, ffn=32, context=32)
    prompt = torch.arange(5)[None]
    expected = generate(Transformer(config), prompt, max_new_tokens=8)
    return expected, [
        generate(shard_(Transformer(config), Zero(stage=stage)), prompt, max_new_tokens=8)
        for stage in range(4)
    ]


def test_generation(ranks):
    expected, found = ranks(2, generation)[1]
    assert found == [expected] * 4


def misuse():
    model = make()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OrderError, match="not sharded; apply"):
        no_sync(model).__enter__()
    shard_(model)
    assert ledger.applied(model) == ("shard_",)
    with pytest.raises(OrderError, match="this model went through shard_ already"):
        shard_(model)
    with pytest.raises(OrderError, match="its part 'inner' went through"):
        shard_(nn.ModuleDict({"inner": model}))
    with pytest.raises(OrderError, match="cannot be copied"):
        copy.deepcopy(model)
    with no_sync(model):
        loss_of(model, next(batches(1))).backward()
    with pytest.raises(OrderError, match=r"collected under no_sync and is not reduced"):
        torch.optim.SGD(model.parameters()).step()
    loss_of(model, next(batches(1))).backward()
    with pytest.raises(OrderError, match=r"before sharding: 22 of its 22 parameters"):
        early.step()
    with pytest.raises(ConfigError, match=r"LBFGS needs whole parameters .* \(stage 2\)"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
    with pytest.raises(ConfigError, match=r"max_norm is 0"):
        clip_grad_norm_(model, 0)
    quantized = make()
    quantized.code = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"'code' is torch.int8"):
        shard_(quantized)
    with pytest.raises(ConfigError, match="no parameters"):
        shard_(nn.GELU())
    with pytest.raises(ConfigError, match=r"product is 2"):
        shard_(make(), mesh=Mesh({"shard": 3}))
    with pytest.raises(ConfigError, match="'shard' has 2 ranks, but stage 0"):
        shard_(make(), Zero(stage=0), mesh=Mesh({"shard": 2}))
    with pytest.raises(ConfigError, match="'rows' means nothing"):
        shard_(make(), mesh=Mesh({"rows": 2}))
    with pytest.raises(ConfigError, match="stage"):
        Zero(stage=4)


def optimizers():
    """Which of torch's can work on shards is found out, not listed."""
    model = shard_(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), Zero(stage=2))
    model(torch.ones(2, 4)).sum().backward()
    refused = {
        "Adafactor": torch.optim.Adafactor(model.parameters()),
        "Rprop": torch.optim.Rprop(model.parameters()),
        "SGD": torch.optim.SGD(model.parameters(), fused=True),
        "Muon": torch.optim.Muon([model[0].weight]),
    }
    for name, optimizer in refused.items():
        with pytest.raises(ConfigError, match=rf"{name} .* shards .*stage 2.* lz.Zero\(stage=0\)"):
            optimizer.step()
    with pytest.raises(ConfigError, match=r"0.weight': it does not work element by element"):
        probe.check(refused["Muon"])
    before = torch.random.get_rng_state()
    for kind in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD):
        kind(model.parameters(), lr=0.1).step()
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_optimizer_that_cannot_work_on_shards_is_refused(ranks):
    ranks(2, optimizers)


def test_misuse_is_told_on_every_rank(ranks):
    ranks(2, misuse)


def different():
    me = groups.rank()
    for key, call in {
        "zero.stage": lambda: shard_(make(), Zero(stage=1 + me)),
        "wire.codec": lambda: shard_(make(), wire=Wire(codec=("none", "int8")[me])),
    }.items():
        with pytest.raises(DistributedError, match=f"'{key}' is .* on rank 0 but .* on rank 1"):
            call()
    with pytest.raises(DistributedError, match=r"shape of .* 'embed.weight' is \[19, 12\] on"):
        shard_(make(width=12 + 4 * me))
    model = make()
    model.norm.bias.requires_grad_(not me)
    with pytest.raises(
        DistributedError, match=r"requires_grad of .* 'norm.bias' is True on rank 0"
    ):
        shard_(model)
    with pytest.raises(
        DistributedError,
        match=r"\(17 par.* 23 on rank 1\): .* 'norm.weight' on .* 'blocks.2.norm.w",
    ):
        shard_(make(blocks=2 + me, tied=False))
    broken = make()
    if me:
        broken.code = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises((ConfigError, DistributedError), match=r"'code' is torch.int8"):
        shard_(broken)


def test_ranks_that_differ_are_told_what(ranks):
    ranks(2, different)


def refused():
    for arguments, named in (
        ((make(), 3), r"config is 3; allowed is lz.Zero"),
        ((make(), 0), r"config is 0; allowed is lz.Zero"),
        ((make(), Zero(), "int8"), r"wire is 'int8'; allowed is lz.Wire"),
        ((make(), Zero(), None, {"shard": 2}), r"mesh is \{'shard': 2\}; allowed is lz.Mesh"),
        (([],), r"model is \[\]; allowed is a torch.nn.Module"),
    ):
        given = dict(zip(("model", "config", "wire", "mesh"), arguments, strict=False))
        with pytest.raises(ConfigError, match=named):
            shard_(**given)
    for stage in (1, 3):
        with pytest.raises(ConfigError, match=r"' computes in torch.float16.*stage=0"):
            shard_(make(dtype=torch.float16), Zero(stage=stage))
    for codec in ("sign", "topk:0.1", "2:4-int8"):
        with pytest.raises(ConfigError, match=r"wire.feedback: 'worker' is not allowed"):
            shard_(make(), Zero(stage=0), wire=Wire(codec=codec, feedback="worker"))
    for stage in (0, 2):
        with pytest.raises(ConfigError, match=r"lz.shard_: .*float64, .* wire.codec='none'"):
            shard_(make(dtype=torch.float64), Zero(stage=stage), wire=Wire(codec="int8"))
    with pytest.raises(ConfigError, match=r"lz.shard_: .*float64, .* wire.gather='none'"):
        shard_(make(dtype=torch.float64), Zero(stage=2), wire=Wire(gather="int8"))
    model = make()
    with pytest.raises(ConfigError):
        shard_(model, Zero(stage=0), wire=Wire(codec="2:4-int8", feedback="worker"))
    loss_of(shard_(model), next(batches(1)))  # as it was


def test_wires_and_types_that_cannot_be_are_refused_before_anything_is_split(ranks):
    ranks(2, refused)


def normed():
    found = []
    for stage in range(4):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.InstanceNorm2d(6, affine=True)
        model = shard_(nn.Sequential(*layers), Zero(stage=stage, compute="bf16"))
        output = model(torch.randn(2, 3, 6, 6))
        output.float().square().mean().backward()
        assert output.dtype is torch.bfloat16
        assert model[1].running_mean.dtype is model[1].weight.grad.dtype is torch.float32
        found.append(whole(model)["0.weight"])
    return found


def test_batch_norms_beside_16_bit_compute(ranks):
    ranks(2, normed)


def stale():
    model = shard_(make(), Zero(stage=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = next(batches(1))
    kept = loss_of(model, tokens)
    loss_of(model, tokens).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    optimizer.zero_grad()
    loss_of(model, tokens).backward()
    return float(grad_norm(model))


def test_a_graph_of_old_parameters_is_refused(ranks):
    first, second = ranks(2, stale)
    assert first == second > 0


def frozen_norm():
    model = shard_(Tiny(), Zero(stage=2))
    return [type(model).__name__, isinstance(model, Tiny), float(grad_norm(model))]


def test_names_stay(ranks):
    assert ranks(2, frozen_norm) == [["Tiny", True, 0.0]] * 2
