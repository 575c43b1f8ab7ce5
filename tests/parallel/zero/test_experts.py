"""Ranks that use different parameters: experts and branches that the data chooses."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lezero.comm.mesh import Mesh
from lezero.core import groups
from lezero.parallel.zero import Zero, no_sync, shard_, sharding_of
from lezero.parallel.zero import shard as shard_module
from tests.parallel.zero.models import WIDTH, Block, Tiny, batches, loss_of, make
from tests.parallel.zero.test_models import differences, gradients_of

STEPS = 2


class Mixture(Block):
    """Three experts, of which each rank uses others at each step."""

    def __init__(self, width=WIDTH):
        super().__init__(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.seed = 0

    def forward(self, x):
        if self.seed % 4 == 3:
            return x
        for which, expert in enumerate(self.experts):
            if (self.seed + which) % 3:
                x = x + F.gelu(expert(x))
        return super().forward(x)


class Experts(Tiny):
    def __init__(self, **options):
        super().__init__(tied=False, **options)
        self.blocks = nn.ModuleList(Mixture() for _ in range(3))
        self.prompt = nn.Parameter(torch.ones(WIDTH))  # used by some ranks, late in backward
        self.bias = nn.Parameter(torch.ones(19))  # used by some ranks, early in backward
        self.through = None  # how a block is called

    def choose(self, rank, step):
        self.seed = rank + step
        for index, block in enumerate(self.blocks):
            block.seed = rank + step + index

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.seed % 2:
            x = x + self.prompt
        for index, block in enumerate(self.blocks):
            x = self.through(index, block, x) if self.through else block(x)
        x = self.head(self.norm(x)) * self.scale
        return x + self.bias if self.seed % 2 else x


def once(model, tokens):
    loss_of(model, tokens).backward()


def twice(model, tokens):
    """Two forwards before one backward."""
    (sum(loss_of(model, part) for part in tokens.chunk(2)) / 2).backward()


def apart(model, tokens):
    """Two forwards, then their backwards."""
    for loss in [loss_of(model, part) / 2 for part in tokens.chunk(2)]:
        loss.backward()


def recomputed(model, tokens):
    model.through = lambda _, block, x: checkpoint(block, x, use_reentrant=False)
    once(model, tokens)


def recomputed_reentrant(model, tokens):
    model.through = lambda _, block, x: checkpoint(block, x, use_reentrant=True)
    once(model, tokens)


def some_recomputed(model, tokens):
    """A block is recomputed while the backward of the one after it is not known to be over."""

    def through(index, block, x):
        return checkpoint(block, x, use_reentrant=True) if index % 2 == 0 else block(x)

    model.through = through
    once(model, tokens)


def recomputed_around(model, tokens):
    """What is recomputed ends with more than the block."""

    def scaled(block, x):
        return x + model.scale * block(x)

    model.through = lambda _, block, x: checkpoint(scaled, block, x, use_reentrant=False)
    once(model, tokens)


RUNS = (
    once, twice, apart, recomputed, recomputed_reentrant, some_recomputed, recomputed_around
)  # fmt: skip


def expected(run):
    """What one process gets that runs the parts of all ranks, one after the other."""
    model, world = make(Experts, torch.float64), groups.world_size()
    parts = [list(batches(STEPS, world, rank)) for rank in range(world)]
    for step in range(STEPS):
        total: dict[str, torch.Tensor] = {}
        for rank in range(world):
            model.zero_grad()
            model.choose(rank, step)
            run(model, parts[rank][step])
            for name, gradient in gradients_of(model).items():
                if gradient is not None:
                    total[name] = total.get(name, 0) + gradient / world
        yield {name: total.get(name) for name, _ in model.named_parameters()}


def compare(stages, axes, solo):
    shard_module.SOLO = solo
    wrong = []
    for run in RUNS:
        wanted = list(expected(run))
        for stage in stages:
            mesh = Mesh(axes) if axes else None
            model = shard_(make(Experts, torch.float64), Zero(stage=stage), mesh=mesh)
            for step, tokens in enumerate(batches(STEPS, groups.world_size(), groups.rank())):
                model.zero_grad()
                model.choose(groups.rank(), step)
                try:
                    run(model, tokens)
                except Exception as error:
                    error.add_note(f"{run.__name__}, stage {stage}")
                    raise
                found = differences(gradients_of(model), wanted[step])
                wrong += [f"{run.__name__}, stage {stage}, step {step}: {one}" for one in found]
            sharding_of(model).close()
    return wrong


@pytest.mark.parametrize(
    ("world", "stages", "axes"),
    [(3, (3,), None), (4, (2, 3), {"replicate": 2, "shard": 2})],
)
def test_ranks_may_use_different_parameters(ranks, world, stages, axes):
    for wrong in ranks(world, compare, stages, axes, 50, timeout_s=100):
        assert wrong == []


def validated(model, tokens):
    """Before the step a forward with gradients, whose output rank 0 alone keeps."""
    output = model(tokens[:, :-1])
    if groups.rank() == 0:
        model.kept = output
    del output
    once(model, tokens)


def reversed_(model, tokens):
    """Two forwards, the later one's backward first."""
    older, newer = (loss_of(model, part) / 2 for part in tokens.chunk(2))
    with no_sync(model):
        newer.backward()
    older.backward()


def older_lives(model, tokens):
    model.kept = loss_of(model, tokens)
    once(model, tokens)


def started(run, options):
    """For each of three backwards how many reductions had started when it ended, and in all."""
    shard_module.SOLO = 50
    model = shard_(make(**options), Zero(stage=3))
    sharding = sharding_of(model)
    link, found = sharding.lines.shard, []
    reduce, at_end = link.reduce_scatter, sharding.backward._reduce_rest
    link.reduce_scatter = lambda *args, **keywords: counts.append(1) or reduce(*args, **keywords)
    sharding.backward._reduce_rest = lambda turns: found.append(len(counts)) or at_end(turns)
    for tokens in batches(3, 2, groups.rank()):
        counts: list[int] = []
        run(model, tokens)
        found.append(len(counts))
    return len(sharding.backward.buckets), found


@pytest.mark.parametrize("options", [{"blocks": 5}, {"blocks": 5, "tied": False}], ids=str)
@pytest.mark.parametrize("run", [once, twice, validated, older_lives, reversed_])
def test_where_all_gradients_come_each_is_reduced_once_while_backward_runs(ranks, run, options):
    for buckets, (_, first, *later) in ranks(2, started, run, options, timeout_s=60):
        assert first == buckets
        assert later == [buckets, buckets] * 2


def changing():
    """Backwards that are not like the first are reduced right, and soon while they run."""
    model = shard_(make(Tiny, torch.float64, blocks=5), Zero(stage=3))
    plain = make(Tiny, torch.float64, blocks=5)
    parts = [list(batches(6, 2, rank)) for rank in range(2)]
    for step in range(6):
        run = once if step in (0, 5) else twice
        model.zero_grad()
        plain.zero_grad()
        run(model, parts[groups.rank()][step])
        for part in parts:
            (sum(loss_of(plain, half) for half in part[step].chunk(2)) / 4).backward()
        assert not list(differences(gradients_of(model), gradients_of(plain)))


def test_a_backward_unlike_the_first_gives_the_same_gradients(ranks):
    ranks(2, changing, timeout_s=60)


def collected_apart(stage):
    """Some ranks alone have collected gradients of a parameter, which are wider than it."""
    shard_module.SOLO = 50
    model = shard_(make(Experts), Zero(stage=stage, compute="bf16"))
    first, second = batches(2, 2, groups.rank())
    with no_sync(model):
        model.choose(groups.rank(), 0)
        once(model, first)
    model.choose(0, 0)
    once(model, second)
    assert model.bias.grad is not None
    assert not sharding_of(model).lent.wide


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_may_use_different_parameters_under_no_sync(ranks, stage):
    ranks(2, collected_apart, stage, timeout_s=60)
