"""What may come to gradients: NaN over codecs, penalties on shards, `zero_grad` at any time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.parallel.zero import Zero, clip_grad_norm_, no_sync, shard_, sharding_of


def layer(stage, rows=5, width=5, **options):
    torch.manual_seed(0)
    return shard_(nn.Linear(width, rows, bias=False), Zero(stage=stage), **options)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def padded(model):
    """The padding of what is given to the sum over the replicas, each time."""
    sharding = sharding_of(model)
    (bucket,), link, seen = sharding.backward.buckets, sharding.lines.replicate, []
    given = link.all_reduce

    def all_reduce(flat, **keywords):
        seen.append([flat[begin:end].clone() for begin, end in bucket._gaps])
        return given(flat, **keywords)

    link.all_reduce = all_reduce
    return seen


def nan_once(stage, axes, codec, feedback):
    """Gradients of steps over a codec of which the second has a NaN on one rank, or has not."""
    found = []
    for bad in (True, False):
        model = layer(stage, wire=Wire(codec=codec, feedback=feedback), mesh=Mesh(axes))
        seen = padded(model)
        for step in range(4):
            model.zero_grad()
            inputs = torch.ones(1, 5) * (1 + groups.rank() + step)
            if bad and step == 1 and groups.rank() == 1:
                inputs[:] = float("nan")
            model(inputs).sum().backward()
            found.append(whole(model.weight.grad))
        assert len(seen) == 4
        assert sum(gap.numel() for gap in seen[0]) > 0
        assert not any(gap.any() for gaps in seen for gap in gaps)  # NaN counts as well
        sharding_of(model).close()
    return found


CUTS = [(0, {"replicate": 2}), (2, {"replicate": 2, "shard": 2}), (3, {"replicate": 2, "shard": 2})]


@pytest.mark.parametrize(("codec", "feedback"), [("int8", "none"), ("sign", "both")])
@pytest.mark.parametrize(("stage", "axes"), CUTS, ids=str)
def test_a_nan_over_a_codec_ends_with_its_step(ranks, stage, axes, codec, feedback):
    for found in ranks(2 * axes.get("shard", 1), nan_once, stage, axes, codec, feedback):
        assert found[1].isnan().any()
        for with_nan, without in zip(found[2:4], found[6:8], strict=True):
            assert with_nan.isfinite().all()
            assert feedback == "both" or torch.equal(with_nan, without)


def squares(model):
    return 3 * whole(model.weight.pow(2).sum())


def total(model):
    return whole(model.weight.sum())  # whose gradient comes in one piece, not split


PENALTIES = {squares: lambda weight: 6 * weight, total: torch.ones_like}


def penalised(stage):
    """Gradients of a penalty on the parameters and of the model, in any order."""
    wrong = []
    x = torch.full((1, 4), 1.0 + groups.rank())

    def first(model, penalty):
        (penalty(model) + model(x).sum()).backward()

    def second(model, penalty):
        loss = model(x).sum()
        (loss + penalty(model)).backward()

    def apart_first(model, penalty):
        penalty(model).backward()
        model(x).sum().backward()

    def apart_second(model, penalty):
        model(x).sum().backward()
        penalty(model).backward()

    def collected(model, penalty):
        with no_sync(model):
            (0 * model(x).sum()).backward()
        first(model, penalty)

    for run in (first, second, apart_first, apart_second, collected):
        for penalty, gradient in PENALTIES.items():
            model = layer(stage, 3, 4)
            for times in (1, 2):
                run(model, penalty)
                expected = times * (gradient(whole(model.weight.detach())) + 1.5)
                grad = model.weight.grad
                right = torch.allclose(whole(grad), expected) and not grad.requires_grad
                split = getattr(grad, "placements", 0) == getattr(model.weight, "placements", 0)
                if not (right and split):
                    wrong.append((run.__name__, penalty.__name__, times))
            sharding_of(model).close()
    return wrong


@pytest.mark.parametrize("stage", range(4))
def test_penalties_on_parameters_add_to_the_gradient(ranks, stage):
    assert ranks(2, penalised, stage) == [[], []]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def foreach(model):
    return torch.optim.AdamW(model.parameters(), foreach=True)


def itself(model):
    return model


def dropped(stage):
    """Gradients after a `zero_grad` that fills with zeros what `no_sync` had collected."""
    found = []
    x = torch.full((1, 4), 1.0 + groups.rank())
    for rows in (4, 1):  # of one row the second rank has nothing
        for owner in (sgd, foreach, itself):
            for before in (False, True):
                model = layer(stage, rows, 4)
                if before:
                    model(x).sum().backward()
                with no_sync(model):
                    model(100 * x).sum().backward()
                owner(model).zero_grad(set_to_none=False)
                model(x).sum().backward()
                assert not model.weight.grad.requires_grad
                found.append(whole(model.weight.grad))
                sharding_of(model).close()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_zeros_of_zero_grad_drop_what_no_sync_collected(ranks, stage):
    for found in ranks(2, dropped, stage):
        assert all((gradient == 1.5).all() for gradient in found)


def clipped_between(stage):
    """A gradient of zeros is clipped after `no_sync` has collected beside it."""
    x = torch.full((1, 4), 1.0 + groups.rank())
    model = layer(stage, 3, 4)
    (0 * model(x)).sum().backward()
    with no_sync(model):
        model(x).sum().backward()
    clip_grad_norm_(model, 1e-3)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model(x).sum().backward()
    return whole(model.weight.grad)


@pytest.mark.parametrize("stage", range(4))
def test_clipping_zeros_drops_nothing(ranks, stage):
    for found in ranks(2, clipped_between, stage):
        assert (found == 3).all()


def summed_in_16_bits(stage):
    """Gradients that have no sum in bf16 until all have come, and what is kept of them."""
    x = torch.full((1, 1), (1.0, 1.0078125)[groups.rank()], dtype=torch.bfloat16)
    found = []
    for times in ((3, 3), (1, 1, 3, 3)):
        model = shard_(nn.Linear(1, 1, bias=False).bfloat16(), Zero(stage=stage))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        (bucket,) = sharding_of(model).backward.buckets
        for count in times:
            for _ in range(count):
                model(x).sum().backward()
            found.append(float(whole(model.weight.grad)))
            optimizer.step()
            assert bool(bucket._totals) == (count == 3)
            optimizer.zero_grad()
        sharding_of(model).close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_of_16_bits_add_up_in_fp32_from_the_first_on(ranks, stage):
    for found in ranks(2, summed_in_16_bits, stage):
        assert found[:2] == [3.015625] * 2  # 3 times 1.00390625, in bf16
        assert found[2:4] == [1.0] * 2
        assert found[5] == 3.015625


def zeroed_in_16_bits(stage):
    x = torch.full((1, 4), 1.0 + groups.rank(), dtype=torch.bfloat16)
    found = []
    for owner in (sgd, foreach, itself):
        model = shard_(nn.Linear(4, 3, bias=False).bfloat16(), Zero(stage=stage))
        for _ in range(3):
            owner(model).zero_grad(set_to_none=False)
            model(x).sum().backward()
            model(x).sum().backward()
            found.append(whole(model.weight.grad))
        sharding_of(model).close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_zeros_of_zero_grad_count_beside_gradients_of_16_bits(ranks, stage):
    for found in ranks(2, zeroed_in_16_bits, stage):
        assert all((gradient == 3).all() for gradient in found)


def collected_in_16_bits(stage):
    """256 and nine times 1, which bf16 would drop, collected; then 1 of a usual backward."""
    model = shard_(nn.Linear(1, 1, bias=False).bfloat16(), Zero(stage=stage))
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    with no_sync(model):
        for x in (256 * one, *[one] * 9):
            model(x).sum().backward()
    model(one).sum().backward()
    return float(whole(model.weight.grad))


@pytest.mark.parametrize("stage", range(4))
def test_no_sync_adds_gradients_of_16_bits_up_in_fp32(ranks, stage):
    assert ranks(2, collected_in_16_bits, stage) == [266.0] * 2


def arrived(stage, axes, steps):
    """How much of a constant gradient, with entries of very different sizes, has not arrived."""
    wire = Wire(codec="int4", feedback="both")
    model = layer(stage, 7, 33, wire=wire, mesh=Mesh(axes))
    x = torch.rand(1, 33, generator=torch.Generator().manual_seed(groups.rank()))
    x[:, :11] *= 1e-2
    total = torch.zeros(7, 33)
    for _ in range(steps):
        model(x).sum().backward()
        total += whole(model.weight.grad)
        model.zero_grad()
    sharding_of(model).close()
    wanted = groups.all_reduce_sum(x.clone()) / groups.world_size() * steps
    return float((total / wanted - 1).abs().max())


def test_what_a_codec_keeps_of_small_gradients_arrives_over_both_axes(ranks):
    assert max(ranks(4, arrived, *CUTS[1], 60)) < 0.5
