"""Models built on meta: materialised unit by unit, with the same values for any split."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lezero.comm import Mesh
from lezero.core import groups
from lezero.core.errors import ConfigError, OrderError
from lezero.parallel.zero import (
    Zero,
    full_state_dict,
    materialize_,
    shard_,
    sharding_of,
)
from lezero.parallel.zero.materialize import allocate_
from tests.parallel.zero.models import Tiny, batches, loss_of, whole


class Drawn(Tiny):
    """Every parameter has a module that initialises it."""

    def __init__(self):
        super().__init__()
        del self.scale
        self.scale = 1.0
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def reset_parameters(self):
        self.seen.zero_()


class SharedInBlocks(Drawn):
    """A weight that modules of blocks alone have."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


def on_meta(kind=Drawn):
    with torch.device("meta"):
        return kind()


def values(stage, kind=Drawn):
    before = torch.random.get_rng_state()
    model = shard_(on_meta(kind), Zero(stage=stage))
    assert all(p.is_meta for p in model.parameters())
    materialize_(model, seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    loss_of(model, next(batches(1))).backward()
    return whole(model), model.seen.tolist()


def several():
    return [values(stage) for stage in (0, 1, 3)]


def test_the_same_values_for_any_split(ranks):
    expected, seen = values(2)
    assert seen == [0, 0, 0]
    assert expected["blocks.0.up.weight"].std() > 0.1
    assert not torch.equal(expected["blocks.0.up.weight"], expected["blocks.1.up.weight"])
    for world in (2, 3):
        for found, seen in ranks(world, several)[-1]:
            assert seen == [0, 0, 0]
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def shared_by_blocks():
    return [values(stage, SharedInBlocks)[0] for stage in (0, 3)]


def test_a_weight_that_only_blocks_share_gets_its_values_too(ranks):
    apart, expected = values(2)[0], values(2, SharedInBlocks)[0]
    assert expected["blocks.0.up.weight"].std() > 0.1
    for name in ("embed.weight", "blocks.0.down.weight", "blocks.2.norm.weight"):
        assert torch.equal(expected[name], apart[name]), name
    for found in ranks(2, shared_by_blocks)[-1]:
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def largest_piece():
    """The largest parameter that materialising makes, in elements."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not out.is_meta and out.dim() > 1:
                Watch.largest = max(Watch.largest, out.numel())
            return out

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(90, 90)) for _ in range(20)))
    shard_(model, Zero(stage=3))
    with Watch():
        materialize_(model)
    return Watch.largest, sum(p.numel() for p in model.parameters())


def test_no_rank_holds_the_model(ranks):
    for largest, total in ranks(2, largest_piece):
        assert largest < total / 10


class Reaching(Drawn):
    """Initialises what is in its blocks, by rows where they are split."""

    def reset_parameters(self):
        super().reset_parameters()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.uniform_(-1, 1)


class Buffered(nn.Module):
    """A buffer that no `reset_parameters` knows."""

    def __init__(self, buffer, way="not at all"):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_buffer("table", buffer, persistent=False)
        self.inner.register_buffer("nothing", torch.empty(0, dtype=torch.int64))
        self.way = way

    def reset_parameters(self):
        value = torch.zeros(3).to(self.inner.table.dtype)
        if self.way == "in place":
            self.inner.table.copy_(value)
        elif self.way == "another":
            self.inner.table = value
        elif self.way == "data":
            self.inner.table.data.copy_(value + 1)


def forgotten():
    for kind in (torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float32):
        for way in ("in place", "another", "data"):
            buffer = torch.ones(3, dtype=kind, device="meta")
            with torch.device("meta"):
                model = Buffered(buffer, way)
            materialize_(shard_(model))
            assert not model.inner.table.is_meta
        with torch.device("meta"):
            model = Buffered(buffer)
        with pytest.raises(ConfigError, match=r"buffer 'inner.table' got no value; give mater"):
            materialize_(shard_(model))
    model = shard_(on_meta(Tiny))
    with pytest.raises(ConfigError, match="'scale' got no value"):
        materialize_(model)
    for stage in (0, 1, 3):
        with pytest.raises(ConfigError, match=r"of 'the model' changed .*'blocks.0.up.weight'"):
            materialize_(shard_(on_meta(Reaching), Zero(stage=stage)))
    with pytest.raises(OrderError, match="not sharded"):
        materialize_(on_meta())
    plain = shard_(Tiny())
    with pytest.raises(OrderError, match="not on meta"):
        materialize_(plain)


def test_what_an_initialiser_forgets_is_told(ranks):
    ranks(2, forgotten)
    forgotten()


def drawn_apart(stage, replicate):
    """Ranks that draw from elsewhere, and from other seeds."""
    numbers = random.Random(groups.rank())

    def init(module):
        for parameter in module.parameters(recurse=False):
            parameter.data.fill_(numbers.gauss(0, 0.3))
        if hasattr(module, "seen"):
            module.seen.fill_(numbers.random())

    mesh = Mesh({"replicate": 2, "shard": 1}) if replicate else None
    found = []
    for how in ({"init": init}, {"seed": groups.rank()}):
        model = shard_(on_meta(), Zero(stage=stage), mesh=mesh)
        materialize_(model, **how)
        with torch.no_grad():
            found.append((model(next(batches(1))).sum().item(), model.seen.tolist()))
    return found


@pytest.mark.parametrize(
    ("stage", "replicate"), [(0, False), (2, False), (3, False), (2, True), (3, True)]
)
def test_the_first_ranks_values_count(ranks, stage, replicate):
    one, two = ranks(2, drawn_apart, stage, replicate)
    assert one == two
    assert one[0] != one[1]


class Normed(Drawn):
    """A parametrized weight, which calls a module when it is read."""

    def __init__(self):
        super().__init__()
        self.extra = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def normed(stage):
    with torch.device("meta"):
        model, forgets = Normed(), Normed()
    shard_(model, Zero(stage=stage))

    def init(module):
        if isinstance(module, Normed):
            magnitude, direction = module.extra.parametrizations.weight.parameters()
            magnitude.fill_(2.0)
            direction.fill_(1.0)
            module.seen.fill_(float(module.extra.weight.sum()))
            module.extra.bias.zero_()
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    materialize_(model, init=init)
    assert model.seen.tolist() == [16.0] * 3  # 4 rows of length 2 are 1 each
    with pytest.raises(ConfigError, match=r"'extra\.parametrizations.*' got no value"):
        materialize_(shard_(forgets, Zero(stage=stage)))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parametrized_weights_are_read_by_initialisers(ranks, stage):
    ranks(2, normed, stage)
    normed(stage)


def not_yet(stage):
    model = shard_(on_meta(), Zero(stage=stage))
    with pytest.raises(OrderError, match=r"'.*' is still on meta.*call lz\.materialize_"):
        model(next(batches(1)))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_model_that_is_still_on_meta_says_so(ranks, stage):
    ranks(2, not_yet, stage)
    not_yet(stage)


def written(stage):
    """A loader's way: memory without values, then rows."""
    torch.manual_seed(4)
    source = dict(Drawn().named_parameters())
    model = allocate_(shard_(on_meta(), Zero(stage=stage)))
    sharding = sharding_of(model)
    for name in sharding.parameters:
        part = sharding.layout[name]
        sharding.write(name, source[name].detach()[part.start : part.stop])
    tokens = next(batches(1))
    with torch.no_grad():
        before = model(tokens)
        sharding.write("norm.weight", 2 * sharding.local("norm.weight"))
        after = model(tokens)
    torch.testing.assert_close(after, 2 * before)
    return full_state_dict(model), {name: p.detach() for name, p in source.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loader_writes_rows(ranks, stage):
    (found, source), (nothing, _) = ranks(2, written, stage)
    assert nothing == {}
    source["norm.weight"] = 2 * source["norm.weight"]
    assert set(found) == set(Drawn().state_dict())
    assert all(torch.equal(found[name], value) for name, value in source.items())
