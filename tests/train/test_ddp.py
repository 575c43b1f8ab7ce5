"""Two ranks against one, whatever way the loss goes through the model."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
import torch
import torch._dynamo  # the first optimizer step loads it; here it is loaded once for all ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lezero.core import groups
from lezero.core.errors import LeZeroError
from lezero.train.engine import Engine

ROWS, STEPS = 8, 4


class Net(nn.Module):
    scale = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, x):
        return self.head(self.body(x))


def closure(net):
    return lambda _, batch: F.mse_loss(net(batch["x"]), batch["y"])


def parts(net):
    return lambda model, batch: F.mse_loss(
        model.scale * model.head(model.body(batch["x"])), batch["y"]
    )


def one_part(net):
    return lambda model, batch: model.body(batch["x"]).square().mean()


def whole_and_part(net):
    return lambda model, batch: (
        F.mse_loss(model(batch["x"]), batch["y"]) + model.body(batch["x"]).square().mean()
    )


def twice(net):
    def loss(model, batch):
        with torch.no_grad():
            target = model(-batch["x"])
        return F.mse_loss(model(batch["x"]) + model(2 * batch["x"]), target + batch["y"])

    return loss


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    part = ROWS // groups.world_size()
    for _ in range(count):
        x, y = (torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (4, 1))
        yield {name: v[groups.rank() * part :][:part] for name, v in (("x", x), ("y", y))}


def make(loss, **options):
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"precision": "fp32", "compile": "off", "counted": "samples", **options}
    loss = loss(net)
    generator = torch.random.get_rng_state()
    engine = Engine(net, optimizer, loss=loss, **options)
    assert torch.equal(generator, torch.random.get_rng_state())
    return engine


def train(losses, ranks):
    """Losses, norms and weights of some steps with each of `losses`."""
    found = []
    for loss in losses:
        engine = make(loss, accumulate=2 * ranks // groups.world_size())
        told = [(r.loss, r.grad_norm) for r in map(engine.train_step, batches())]
        weights = torch.cat([p.detach().flatten() for p in engine.model.parameters()])
        found.append(torch.cat([torch.tensor(told, dtype=torch.float64).flatten(), weights]))
    return found


def test_gradients_meet_whatever_way_the_loss_goes_through_the_model(ranks):
    losses = (closure, parts, one_part, whole_and_part, twice)
    alone = train(losses, 2)
    for rank in ranks(2, train, losses, 2):
        for loss, mine, whole in zip(losses, rank, alone, strict=True):
            torch.testing.assert_close(mine, whole, atol=1e-10, rtol=0, msg=loss.__name__)


def what_losses_get():
    """Whether the loss is given the model itself, in training as in evaluation."""
    seen = []

    def loss(net):
        def run(model, batch):
            seen.append(model is net)
            return F.mse_loss(model(batch["x"]), batch["y"])

        return run

    engine = make(loss)
    given = list(batches(2))
    engine.train_step(given[0])
    engine.evaluate(given)
    return seen


def test_the_loss_is_given_the_model_itself(ranks):
    assert ranks(2, what_losses_get) == [[True] * 3] * 2


def past_the_model(only_on_rank_1):
    """A loss of something else than the model."""
    own = torch.ones((), dtype=torch.float64, requires_grad=True)
    past = groups.rank() == 1 or not only_on_rank_1

    def loss(net):
        return lambda model, batch: own * batch["y"].mean() if past else model(batch["x"]).mean()

    engine = make(loss)
    try:
        for batch in batches():
            engine.train_step(batch)
    except LeZeroError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_a_loss_that_reaches_nothing_is_an_error_on_every_rank(ranks):
    told = "OrderError: the loss of this rank reached no trained parameter of the model"
    assert all(each.startswith(told) for each in ranks(2, past_the_model, False))
    first, second = ranks(2, past_the_model, True)
    assert second.startswith(told)
    assert "rank 1" in first
    assert "reached no trained parameter" in first


def printed():
    """What a run of ranks writes to stderr, past Python too."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            make(whole_and_part).train_step(next(batches()))
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return file.read().decode()


def test_torch_gives_no_advice_on_a_flag_that_is_meant(ranks):
    for text in ranks(2, printed):
        assert "find_unused_parameters" not in text


def buffers_kept_apart():
    """A buffer that the model tells DDP to leave alone, after steps."""

    def loss(net):
        net.register_buffer("own", torch.tensor(float(groups.rank())))
        net.register_buffer("shared", torch.tensor(float(groups.rank())))
        net._ddp_params_and_buffers_to_ignore = ["own"]
        return closure(net)

    engine = make(loss)
    for batch in batches(2):
        engine.train_step(batch)
    return float(engine.model.own), float(engine.model.shared)


def test_buffers_that_a_model_keeps_from_ddp_stay_each_ranks_own(ranks):
    assert ranks(2, buffers_kept_apart) == [(0.0, 0.0), (1.0, 0.0)]


def evaluated(folder):
    """Losses of a model with running statistics: before it is saved, and of what is loaded."""

    def loss(net):
        return lambda model, batch: F.mse_loss(
            model.head(model.norm(model.body(batch["x"]))), batch["y"]
        )

    given, engine = list(batches(2)), make(loss)
    for batch in given:
        engine.train_step(batch)
    before = engine.evaluate(given)
    engine.save(folder)
    again = make(loss)
    again.load(folder)
    return before, again.evaluate(given), engine.model.norm.running_mean.tolist()


def test_what_is_evaluated_is_what_is_saved(ranks, tmp_path):
    (before, after, mean), other = ranks(2, evaluated, tmp_path)
    assert before == after
    assert other == (before, after, mean)


def part_after(what):
    """What steps of a part of the model tell, and the weights, after a step or a backward pass that
    left in DDP which other parameters took part."""
    does = "whole"

    def loss(net):
        def run(model, batch):
            nonlocal does
            if does == "part":
                return model.body(batch["x"]).mean()
            if does == "not finite":
                return (model(batch["x"]) * 0).sqrt().sum()
            if does == "raises twice":
                raise ValueError("this batch")
            if does == "raises":
                does = "raises twice"
            return F.mse_loss(model(batch["x"]), batch["y"])

        return run

    engine = make(loss, accumulate=4 // groups.world_size())
    told = []
    for batch, does in zip(batches(5), ("whole", what, "part", "whole", "part"), strict=True):
        if does.startswith("outside"):
            if groups.rank() == 0 or "one rank" not in does:
                engine.model(batch["x"]).sum().backward()
                engine.model.zero_grad(set_to_none="cleared" in does)
            continue
        try:
            told.append(str(engine.train_step(batch).skipped))
        except ValueError as error:
            told.append(str(error))
    return told, torch.cat([p.detach().flatten() for p in engine.model.parameters()])


@pytest.mark.parametrize(
    "what", ["not finite", "raises", "outside", "outside, cleared", "outside, cleared, one rank"]
)
def test_a_part_is_trained_after_another_backward(ranks, what):
    told, weights = part_after(what)
    said = {"not finite": "gradient norm is nan", "raises": "this batch"}.get(what, "None")
    assert said in told[1]
    assert set(told[:1] + told[2:]) == {"None"}
    for rank_told, mine in ranks(2, part_after, what):
        assert rank_told[2:] == told[2:]
        assert said in rank_told[1]
        torch.testing.assert_close(mine, weights, atol=1e-10, rtol=0)


def wraps(engine):
    """How often DDP was built in steps before which a caller writes gradients."""
    from lezero.train import ddp

    built = []
    with pytest.MonkeyPatch.context() as patch:
        around = ddp.around
        patch.setattr(ddp, "around", lambda *given, **how: built.append(1) or around(*given, **how))
        for batch in batches():
            for p in engine.model.parameters():
                p.grad = torch.zeros_like(p)
            engine.train_step(batch)
    return len(built)


def written_gradients():
    return wraps(make(closure))


def test_gradients_that_a_caller_writes_are_no_backward(ranks):
    assert ranks(2, written_gradients) == [0, 0]


def reentrant():
    def loss(net):
        return lambda model, batch: model.head(
            checkpoint(model.body, batch["x"].requires_grad_(), use_reentrant=True)
        ).mean()

    try:
        make(loss).train_step(next(batches()))
    except LeZeroError as error:
        return str(error)
    return "trained"


def test_checkpoints_that_ddp_does_not_see_through_are_named(ranks):
    for told in ranks(2, reentrant):
        assert "use_reentrant=False; or shard the model with lz.shard_" in told


def backward_within():
    """A loss that goes backward by itself, and then needs less."""

    def loss(net):
        def run(model, batch):
            model(batch["x"]).sum().backward()
            model.zero_grad()
            return model.body(batch["x"]).mean()

        return run

    engine = make(loss)
    try:
        engine.train_step(next(batches()))
    except LeZeroError as error:
        told = str(error)
    model = engine.model
    hooks = len(model.head.weight._post_accumulate_grad_hooks or {})
    del engine
    gc.collect()
    return told, hooks, len(model.head.weight._post_accumulate_grad_hooks or {})


def test_a_backward_within_the_loss_is_named_and_engines_leave_no_hooks(ranks):
    for told, hooks, left in ranks(2, backward_within):
        assert "let it ask torch.autograd.grad for gradients" in told
        assert (hooks, left) == (1, 0)
