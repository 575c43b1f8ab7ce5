"""What a sharded model can be used for."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.errors import DistributedError, OrderError
from lezero.parallel.zero import (
    Zero,
    clip_grad_norm_,
    full_state_dict,
    grad_norm,
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


def ways(stage):
    """How gradients travel where parameters would be gathered through a codec."""
    axes = {"replicate": 4} if stage == 0 else {"replicate": 2, "shard": 2}
    model = shard_(make(), Zero(stage=stage), wire=Wire(gather="int8"), mesh=Mesh(axes))
    lines = sharding_of(model).lines
    found = [None if link is None else link.topology for link in (lines.shard, lines.replicate)]
    sharding_of(model).close()
    return found


@pytest.mark.parametrize(("stage", "found"), [(0, [None, "shared"]), (2, ["flat", "shared"])])
def test_a_codec_of_gathers_leaves_memory_to_sums(ranks, stage, found):
    assert ranks(4, ways, stage) == [found] * 4


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
            model = shard_(make(), Zero(stage=stage))
            weight = model.embed.weight
            weight.data = weight.data  # nothing
            model(tokens)
            weight.data = weight.data * 2
            with torch.no_grad():
                weight.add_(0)
            with pytest.raises(OrderError, match=r"'embed.weight' was assigned to through .data"):
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


KINDS = (torch.int16, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.float64)


def buffers():
    """Of types that Gloo does not move, and not contiguous."""
    found = []
    for stage in (0, 3):
        model = make()
        for at, kind in enumerate(KINDS):
            value = torch.full((2, 3), 1.0 - groups.rank()).to(kind)
            model.register_buffer(f"kind{at}", value.t() if at else value[0, 0])
        shard_(model, Zero(stage=stage))
        mine = [model.get_buffer(f"kind{at}") for at in range(len(KINDS))]
        found += [value if value.is_complex() else value.float() for value in mine]
    return found


def test_buffers_of_any_type_are_rank_0s(ranks):
    for found in ranks(2, buffers):
        assert all((value == 1).all() for value in found)
        assert {value.shape for value in found} == {torch.Size([]), torch.Size([3, 2])}


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


def failing():
    """A loop of one's own, which one rank leaves with an error."""
    model = shard_(make(), Zero(stage=2), wire=Wire(topology="flat"))
    try:
        for number, tokens in enumerate(batches(3, 2, groups.rank())):
            if number == 2 and groups.rank() == 1:
                raise ValueError("row 7 is bad")
            loss_of(model, tokens).backward()
    except ValueError:
        groups.leave()
    except DistributedError as error:
        return str(error)
    return ""


def test_a_rank_that_fails_in_a_bare_loop_is_named(ranks):
    told, _ = ranks(2, failing)
    assert "rank 1 failed: ValueError: row 7 is bad" in told


def parted(stage):
    """One rank gathers the whole weights while the other trains."""
    model, tokens = shard_(make(), Zero(stage=stage)), next(batches(1))
    loss_of(model, tokens).backward()
    try:
        if groups.rank() == 1:
            full_state_dict(model)
        loss_of(model, tokens).backward()
    except DistributedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_gathers_whole_weights_alone_is_named(ranks, stage):
    for told in ranks(2, parted, stage):
        assert "the ranks parted" in told
        assert "rank 1 entered all_gather of" in told


def averaged():
    """What docs/zero.md says of an average of weights."""
    for stage in range(4):
        model = make()
        mean = shard_(copy.deepcopy(model), Zero(stage=stage))
        shard_(model, Zero(stage=stage))
        before, tokens = whole(model), next(batches(1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, tokens).backward()
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(mean.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 0.25)
        mean(tokens)
        now, found = whole(model), whole(mean)
        for name, value in found.items():
            torch.testing.assert_close(value, before[name].lerp(now[name], 0.25))


def test_an_average_of_weights_is_a_second_sharded_model(ranks):
    ranks(2, averaged)


def without_dims(stage, wire, axes):
    """A parameter without dims and its gradients, after some steps over codecs."""
    model = shard_(make(), Zero(stage=stage), wire=wire, mesh=Mesh(axes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for tokens in batches(4, groups.world_size(), groups.rank()):
        for part in tokens.chunk(2):
            loss_of(model, part).backward()
        found.append(float(model.scale.grad.to_local()))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, float(model.scale.to_local())]


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_without_dims_is_the_same_on_every_rank_over_a_codec(ranks, stage, axes):
    world = 2 * axes.get("replicate", 1)
    first, *others = ranks(world, without_dims, stage, Wire(codec="sign", feedback="both"), axes)
    assert all(other == first for other in others)
