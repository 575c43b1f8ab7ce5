"""Models and loops of every kind: the gradients of each stage equal those of one process."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.parallel.zero import Zero, no_sync, shard_, sharding_of
from lezero.parallel.zero import shard as shard_module
from tests.parallel.zero.models import WIDTH, Block, DeepSupervision, Tiny, batches, loss_of, make


class Frozen(Tiny):
    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[1].requires_grad_(False)
        self.blocks[0].up.bias.requires_grad_(False)
        self.norm.requires_grad_(False)


class Unused(Tiny):
    """A whole block, one parameter of a used block, and one of the root get no gradient."""

    def __init__(self, **options):
        super().__init__(**options)
        self.extra = nn.Parameter(torch.ones(5))
        self.blocks[0].spare = nn.Parameter(torch.ones(3, 2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in (self.blocks[0], self.blocks[2]):
            x = block(x)
        return self.head(self.norm(x)) * self.scale


class Shared(Tiny):
    """Two blocks share a weight, and one block runs twice."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.head(self.norm(x)) * self.scale


class Checkpointed(Tiny):
    def __init__(self, reentrant=False, span=1, twice=False, **options):
        super().__init__(**options)
        self.reentrant, self.span, self.twice = reentrant, span, twice

    def forward(self, tokens):
        x = self.embed(tokens)
        for start in range(0, len(self.blocks), self.span):
            part = list(self.blocks[start : start + self.span])

            def run(x, part=part):
                for block in part * (1 + self.twice):
                    x = block(x)
                return x

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        if self.twice:
            x = checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)
        return self.head(self.norm(x)) * self.scale


class Recurrent(nn.Module):
    """nn.LSTM keeps a list of its weights beside the table; the output is a mapping."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(19, WIDTH)
        self.rnn = nn.LSTM(WIDTH, 19, batch_first=True)

    def forward(self, tokens):
        return {"logits": self.rnn(self.embed(tokens))[0]}


class Nested(nn.Module):
    """A block inside a block of the same class, in use at the same time."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(19, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 19)

    def forward(self, tokens):
        x = self.embed(tokens)
        hook = self.blocks[0].norm.register_forward_hook(lambda *a: self.blocks[2](a[2]))
        x = self.blocks[3](self.blocks[1](self.blocks[0](x)))
        hook.remove()
        return self.head(x)


def supervised(model, tokens):
    loss = loss_of(model, tokens)
    (loss + sum(model.losses)).backward()


def backward(model, tokens):
    loss_of(model, tokens).backward()


def two_forwards(model, tokens):
    losses = [loss_of(model, part) for part in tokens.chunk(2)]
    (sum(losses) / 2).backward()


def two_backwards(model, tokens):
    for part in tokens.chunk(2):
        (loss_of(model, part) / 2).backward()


def without_sync(model, tokens):
    *parts, last = tokens.chunk(4)
    with no_sync(model) if sharding_of(model) else contextlib.nullcontext():
        for part in parts:
            (loss_of(model, part) / 4).backward()
    (loss_of(model, last) / 4).backward()


def dropped(model, tokens):
    """What was collected under no_sync goes with zero_grad, of either kind."""
    inside = no_sync(model) if sharding_of(model) else contextlib.nullcontext()
    with inside:
        loss_of(model, tokens[:1]).backward()
        model.zero_grad(set_to_none=False)
        loss_of(model, tokens[:2]).backward()
    model.zero_grad()
    without_sync(model, tokens)


def unfrozen(model, tokens):
    """What is trained changes from one backward to the next."""
    model.blocks[2].requires_grad_(False)
    loss_of(model, tokens).backward()
    model.zero_grad()
    model.requires_grad_(True)
    loss_of(model, tokens).backward()


def mapping(model, tokens):
    logits = model(tokens[:, :-1])["logits"]
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def fail(*_):
    raise KeyError("on purpose")


def failed_backward(model, tokens):
    logits = model(tokens[:, :-1])
    logits.register_hook(fail)
    with pytest.raises(KeyError):
        logits.sum().backward()
    model.zero_grad()


def failing(model, tokens):
    """An exception in the middle of a forward, and one in a backward, leave a usable model."""
    hook = model.blocks[1].down.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(tokens[:, :-1])
    hook.remove()
    with torch.no_grad():
        model(tokens[:, :-1])
    failed_backward(model, tokens)
    loss_of(model, tokens).backward()


def by_forward(model, tokens):
    logits = model.forward(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def by_parts(model, tokens):
    """Modules that are no blocks, called alone, beside a call of the model."""
    x = model.head(model.norm(model.blocks[1](model.embed(tokens))))
    (x.square().mean() + loss_of(model, tokens)).backward()


def by_blocks(model, tokens):
    """Blocks that share a weight, called alone, after a failure and beside a call of the model."""
    failed_backward(model, tokens)
    x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
    first, _, last = model.blocks
    for reentrant in (False, True):
        x = first(checkpoint(last, first(x), use_reentrant=reentrant))
    with torch.no_grad():
        first(x)
    (model.blocks[1](x).square().mean() + loss_of(model, tokens)).backward()


def compiled(model, tokens):
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    loss_of(model, tokens).backward()


def compiled_whole(model, tokens):
    loss_of(torch.compile(model, backend="aot_eager"), tokens).backward()


def evaluated(model, tokens):
    """Evaluation between forward and backward."""
    loss = loss_of(model, tokens)
    with torch.no_grad():
        model(tokens[:, :-1])
    loss.backward()


LOADED_ONCE = ("torch._inductor.compile_fx",)  # by the first compilation
CASES = {
    "plain": (Tiny, {}, backward),
    "untied": (Tiny, {"tied": False}, backward),
    "many blocks": (Tiny, {"blocks": 7}, backward),
    "no blocks": (Tiny, {"blocks": 1}, backward),
    "frozen": (Frozen, {}, backward),
    "unfrozen": (Frozen, {}, unfrozen),
    "unused": (Unused, {}, backward),
    "shared": (Shared, {}, backward),
    "recompute": (Checkpointed, {}, backward),
    "recompute, spans": (Checkpointed, {"span": 3, "blocks": 6}, backward),
    "recompute, reentrant": (Checkpointed, {"reentrant": True}, backward),
    "recompute, reentrant spans": (
        Checkpointed,
        {"reentrant": True, "span": 3, "blocks": 6},
        backward,
    ),
    "recompute twice": (Checkpointed, {"twice": True}, backward),
    "recompute twice, reentrant": (Checkpointed, {"twice": True, "reentrant": True}, backward),
    "recurrent": (Recurrent, {}, mapping),
    "nested": (Nested, {}, backward),
    "losses in attributes": (DeepSupervision, {"way": "attribute"}, supervised),
    "losses in objects": (DeepSupervision, {"way": "object"}, supervised),
    "two forwards": (Tiny, {}, two_forwards),
    "two backwards": (Tiny, {}, two_backwards),
    "unused, two backwards": (Unused, {}, two_backwards),
    "no_sync": (Tiny, {}, without_sync),
    "no_sync, unused": (Unused, {}, without_sync),
    "no_sync, dropped": (Tiny, {}, dropped),
    "failing": (Tiny, {}, failing),
    "compiled": (Tiny, {}, compiled),
    "compiled whole": (Tiny, {}, compiled_whole),
    "evaluated": (Tiny, {}, evaluated),
    "by forward": (Tiny, {}, by_forward),
    "by parts": (Tiny, {}, by_parts),
    "by blocks": (Shared, {}, by_blocks),
}


def gradients_of(model):
    return {
        name: None
        if p.grad is None
        else p.grad.full_tensor()
        if hasattr(p.grad, "full_tensor")
        else p.grad.clone()
        for name, p in model.named_parameters()
    }


def compare(solo, stages):
    """Runs every case at these stages, two steps each, and names what differs."""
    shard_module.SOLO = solo
    wrong = []
    for case, (kind, options, run) in CASES.items():
        plain = make(kind, torch.float64, **options)
        expected = []
        for tokens in batches(2):
            plain.zero_grad()
            run(plain, tokens)
            expected.append(gradients_of(plain))
        for stage in stages:
            model = shard_(make(kind, torch.float64, **options), Zero(stage=stage))
            for step, tokens in enumerate(batches(2, groups.world_size(), groups.rank())):
                model.zero_grad()
                try:
                    run(model, tokens)
                except Exception as error:
                    error.add_note(f"case '{case}', stage {stage}")
                    raise
                wrong += [
                    f"{case}, stage {stage}, step {step}: {difference}"
                    for difference in differences(gradients_of(model), expected[step])
                ]
            sharding_of(model).close()
    return wrong


def sent(stage):
    """Bytes that this rank sent for gradients, those of what is trained, and what was kept."""
    model = shard_(make(Frozen), Zero(stage=stage), wire=Wire(topology="flat"))
    sharding = sharding_of(model)
    link = sharding.lines.shard or sharding.lines.replicate
    operation = "reduce_scatter" if stage else "all_reduce"
    trained = [bucket for bucket in sharding.backward.buckets if bucket.trainable]
    lengths = [bucket.segment.ranks * bucket._length for bucket in trained]
    each = [link.sent_bytes(operation, length, torch.float32) for length in lengths]
    found = []
    for tokens in batches(2, 2, groups.rank()):
        link.account.take()
        backward(model, tokens)
        found.append((link.account.take()[operation], sum(each)))
    frozen = [bucket for bucket in sharding.backward.buckets if not bucket.trainable]
    assert len(frozen) == 3
    return found, [bucket._own for bucket in frozen]


@pytest.mark.parametrize("stage", range(4))
def test_frozen_parameters_cost_neither_bytes_nor_memory(ranks, stage):
    for found, kept in ranks(2, sent, stage):
        assert all(bytes_ == expected > 0 for bytes_, expected in found)
        assert kept == [None] * len(kept)


def failing_often(stage):
    """How many gradient buffers there are after each of several backwards that failed."""
    model = shard_(make(), Zero(stage=stage))
    model.blocks[0].register_forward_hook(lambda *a: a[2].register_hook(fail) and None)
    counts = []
    for tokens in batches(4, 2, groups.rank()):
        loss = loss_of(model, tokens)
        counts.append(sum(sharding_of(model).lent._made.values()))
        with pytest.raises(KeyError):
            loss.backward()
    return counts


@pytest.mark.parametrize("stage", [1, 3])
def test_a_failed_backward_gives_its_buffers_back(ranks, stage):
    for counts in ranks(2, failing_often, stage):
        assert counts[0] == 0 < counts[1] == counts[2] == counts[3]


def added_up(stage):
    """Gradients in bf16 of one backward, and of many small ones that add up to it."""
    found = []
    for parts in (1, 64):
        model = shard_(make(dtype=torch.bfloat16), Zero(stage=stage))
        for _ in range(parts):
            (loss_of(model, next(batches(1))).float() / parts).backward()
        found.append(gradients_of(model))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_many_small_gradients_in_bf16_are_not_lost(ranks, stage):
    for once, often in ranks(2, added_up, stage):
        for name, gradient in once.items():
            assert gradient.dtype == torch.bfloat16
            torch.testing.assert_close(often[name], gradient, rtol=2**-7, atol=0, msg=name)


def differences(found, expected):
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        mine = found[name]
        if (mine is None) != (gradient is None):
            yield f"{name} is {mine}, not {gradient}"
        elif mine is not None and not torch.allclose(mine, gradient, rtol=1e-9, atol=1e-11):
            yield f"{name} differs by {(mine - gradient).abs().max()}"


@pytest.mark.parametrize(("world", "solo", "stages"), [(2, 50, (2, 3)), (3, 1 << 15, (0, 1))])
def test_every_case_at_every_stage(ranks, world, solo, stages):
    assert ranks(world, compare, solo, stages, timeout_s=300) == [[]] * world
