"""Several ranks against one: the same sums, the same decisions, the same end."""

from __future__ import annotations

import logging
import os
import random
import signal

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer step loads it; here it is loaded once for all ranks
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

from lezero.core import groups
from lezero.core.errors import ConfigError, DistributedError
from lezero.data import Loader
from lezero.optim import AdamW, Schedule
from lezero.train import Callback, Trainer
from lezero.train.engine import Engine
from lezero.train.loss import next_token_loss
from tests.train.runs import config, filled_cache, settings

__all__ = ["filled_cache"]

VOCAB, ROWS, LENGTH, STEPS = 19, 12, 6, 20


class Tiny(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.head(self.norm(x))


def make(dtype=torch.float64, dropout=0.0, **options):
    torch.manual_seed(0)
    model = Tiny(dropout).to(dtype)
    options = {"precision": "fp32", "compile": "off", "loss": next_token_loss, **options}
    return Engine(model, AdamW(model, lr=1e-2), **options)


def global_batches(count, masked_rows=()):
    """Batches whose rows count 0 to 5 tokens each; `masked_rows` count none."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens, targets = (
            torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator) for _ in range(2)
        )
        for row in range(ROWS):
            targets[row, : (row * row) % LENGTH] = -100
        for row in masked_rows:
            targets[row] = -100
        yield {"tokens": tokens, "targets": targets}


def mine(batch):
    """This rank's contiguous part of a global batch."""
    part = ROWS // groups.world_size()
    return {k: v[groups.rank() * part :][:part] for k, v in batch.items()}


def train(accumulate, masked_rows, plain_mean=False):
    """20 steps; returns losses, norms, token counts and the final weights."""
    loss = plain_masked_mean if plain_mean else next_token_loss
    engine = make(accumulate=accumulate, clip=0.3, loss=loss)
    results = [engine.train_step(mine(batch)) for batch in global_batches(STEPS, masked_rows)]
    assert not any(r.skipped for r in results), results[0].skipped
    weights = {name: p.detach().numpy() for name, p in engine.model.named_parameters()}
    return [(r.loss, r.grad_norm, r.tokens) for r in results], weights


def plain_masked_mean(model, batch):
    """A loss as users write it: 0/0 where nothing counts."""
    kept = (batch["targets"] != -100).double()
    targets = batch["targets"].clamp(min=0)
    each = F.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), targets.flatten(), reduction="none"
    )
    return (each * kept.flatten()).sum() / kept.sum()


def assert_agree(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        assert a[2] == b[2]
        assert abs(a[0] - b[0]) < 1e-10
        assert abs(a[1] - b[1]) < 1e-10
    for name, value in one[1].items():
        assert np.abs(value - other[1][name]).max() < 1e-10, name


@pytest.mark.parametrize(
    ("world", "accumulate", "masked_rows"),
    [(2, 1, ()), (2, 3, ()), (3, 2, ()), (2, 3, (0, 1, 6, 7, 10, 11)), (2, 2, range(6, 12))],
    ids=["two", "accumulating", "three", "masked-micro-batches", "masked-rank"],
)
def test_ranks_agree_with_one_process_over_20_steps(ranks, world, accumulate, masked_rows):
    alone = train(1, masked_rows)
    together = ranks(world, train, accumulate, masked_rows)
    for rank in together:
        assert_agree(alone, rank)
        assert rank[0] == together[0][0], "ranks report different figures"
        for name, value in rank[1].items():
            assert np.array_equal(value, together[0][1][name]), name


@pytest.mark.parametrize("masked_rows", [range(6, 12), (3, 4, 5)], ids=["rank", "micro-batch"])
def test_a_rank_without_any_counted_token_adds_nothing_even_where_the_loss_is_0_over_0(
    ranks, masked_rows
):
    alone = train(1, masked_rows, plain_mean=True)
    for rank in ranks(2, train, 2, masked_rows, plain_mean=True):
        assert_agree(alone, rank)


class Poisoned(nn.Linear):
    poison = False

    def forward(self, x):
        y = super().forward(x)
        return y / 0.0 if self.poison else y


def one_bad_rank():
    engine = make()
    logged = []
    logger = logging.getLogger("lezero.train")
    logger.addFilter(lambda record: logged.append(record.getMessage()) or True)
    torch.manual_seed(0)
    model = Tiny().double()
    model.layers[1] = Poisoned(8, 8).double()
    engine = Engine(
        model, AdamW(model, lr=1e-2), loss=next_token_loss, precision="fp32", compile="off",
        max_skipped=3, clip=1.0,
    )  # fmt: skip
    batches = [mine(b) for b in global_batches(6)]
    told = [engine.train_step(batches[0]).skipped]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.layers[1].poison = groups.rank() == 1
    told.append(engine.train_step(batches[1]).skipped)
    untouched = all(torch.equal(before[n], p) for n, p in model.named_parameters())
    model.layers[1].poison = False
    told.append(engine.train_step(batches[2]).skipped)
    model.layers[1].poison = groups.rank() == 1
    error = ""
    try:
        for batch in batches[3:]:
            engine.train_step(batch)
    except ArithmeticError as found:
        error = str(found)
    logger.filters.clear()
    return told, untouched, error, len(logged)


def test_a_non_finite_value_on_one_rank_skips_the_step_on_all_and_names_rank_and_module(ranks):
    first, second = ranks(2, one_bad_rank)
    assert first[:3] == second[:3]
    assert (first[3], second[3]) == (3, 0), "told once, not once a rank"
    told, untouched, error, _ = first
    assert told[0] is None
    assert told[2] is None
    assert "output of module 'layers.1'" in told[1]
    assert "(rank 1)" in told[1]
    assert untouched
    assert "non-finite step 3 in a row" in error


def stop_on_the_last_rank():
    engine = make()
    stops = []
    for i, batch in enumerate(global_batches(4)):
        if i == 2 and groups.rank() == groups.world_size() - 1:
            engine.request_stop()
        stops.append(engine.train_step(mine(batch)).stop)
        if stops[-1]:
            break
    return stops


def test_a_stop_request_on_one_rank_stops_all_after_the_same_step(ranks):
    assert ranks(3, stop_on_the_last_rank) == [[False, False, True]] * 3


def automatic_choices():
    torch.manual_seed(0)
    model = Tiny()
    engine = Engine(model, AdamW(model), loss=next_token_loss, total_steps=50)
    for batch in global_batches(2):
        engine.train_step(mine(batch))
    engine.set_precision("bf16")
    return engine.decisions.to_json()


def test_decisions_are_the_same_on_every_rank(ranks):
    first, second = ranks(2, automatic_choices)
    assert first == second
    topics = {d["topic"]: d for d in first["decisions"]}
    assert topics.keys() >= {"precision", "compile", "host memory pool"}
    assert topics["precision"]["chosen"] == "bf16"
    assert topics["compile"]["candidates"]["eager"]["predicted s for the run"] > 0


def contrast(form):
    """Two encoders whose loss gathers the features of all ranks by itself."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(4, 3) for name in ("left", "right")})

    def loss(model, batch):
        sides = [F.normalize(model[name](batch[name]), dim=1) for name in model]
        one, other = (torch.cat(all_gather(side)) for side in sides)
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))

    engine = Engine(
        model, AdamW(model), loss=loss, precision="fp32", compile=form, counted="samples"
    )
    draw = torch.Generator().manual_seed(groups.rank())
    batch = {name: torch.randn(4, 4, generator=draw) for name in model}
    return [engine.train_step(batch).loss for _ in range(6)]


def test_a_loss_may_have_a_collective_of_its_own(ranks):
    plain = ranks(2, contrast, "off")
    assert ranks(2, contrast, "auto") == plain
    assert plain[0] == plain[1]
    assert plain[0][-1] < plain[0][0]


def evaluate_unevenly():
    engine = make()
    batches = list(global_batches(5))
    own = batches[:4] if groups.rank() == 0 else batches[4:]
    with pytest.raises(ConfigError, match="no batch to evaluate, on any rank"):
        engine.evaluate([])
    masked = [{**batch, "targets": torch.full_like(batch["targets"], -100)} for batch in batches]
    value = engine.evaluate(batches if groups.world_size() == 1 else own)
    return value, engine.evaluate(masked if groups.rank() == 0 else [])


def test_validation_over_uneven_numbers_of_batches(ranks):
    alone, nothing = evaluate_unevenly()
    assert nothing != nothing, "nothing counted is NaN"
    for value, empty in ranks(2, evaluate_unevenly):
        assert abs(value - alone) < 1e-12
        assert empty != empty


def unfrozen_later(only_on_rank_0=False):
    """The embedding joins after 3 steps, and the head leaves after 6."""
    torch.manual_seed(0)
    model = Tiny().double()
    model.embed.requires_grad_(False)
    engine = Engine(
        model, AdamW(model, lr=1e-2), loss=next_token_loss, precision="fp32", compile="off"
    )
    figures = []
    for step, batch in enumerate(global_batches(9)):
        if step == 3 and groups.rank() <= (0 if only_on_rank_0 else 1):
            model.embed.requires_grad_(True)
            engine.optimizer.add_param_group({"params": list(model.embed.parameters())})
        if step == 6:
            model.head.requires_grad_(False)
        result = engine.train_step(mine(batch))
        figures.append((result.loss, result.grad_norm, result.tokens))
    return figures, {name: p.detach().numpy() for name, p in model.named_parameters()}


def test_what_is_unfrozen_in_mid_run_trains_on_every_rank(ranks):
    alone = unfrozen_later()
    for rank in ranks(2, unfrozen_later):
        assert_agree(alone, rank)
    told = "the parameters that are trained: 'embed.weight' is 'trained' on rank 0 but 'nothing'"
    with pytest.raises(DistributedError, match=told):
        ranks(2, unfrozen_later, only_on_rank_0=True)


class Rows:
    digest = "d"

    def __len__(self):
        return 100

    def row(self, index):
        values = np.random.default_rng(index).integers(0, VOCAB, (2, LENGTH))
        values[1, : index % LENGTH] = -100
        return values[0], values[1]


def losses_of_a_loader(accumulate):
    rank, world = groups.rank(), groups.world_size()
    loader = Loader(Rows(), ROWS, seed=3, rank=rank, world=world)
    engine = make(accumulate=accumulate, dropout=0.3)
    return [engine.train_step(next(loader)).loss for _ in range(10)]


def test_ranks_times_accumulation_is_what_counts(ranks):
    """With dropout: its randomness belongs to the micro-batch, not to the rank."""
    alone = losses_of_a_loader(6)
    for world, accumulate in ((2, 3), (3, 2)):
        for losses in ranks(world, losses_of_a_loader, accumulate):
            assert losses == pytest.approx(alone, abs=1e-10)


def drawn():
    return [torch.rand(()).item(), np.random.randn(), random.gauss(0, 1)]


def save_and_load(folder):
    """Saves on two ranks, goes on, loads, goes on again."""
    batches = [mine(b) for b in global_batches(6)]
    engine = make(dropout=0.2)
    for batch in batches[:3]:
        engine.train_step(batch)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(groups.rank())
    for _ in range(groups.rank()):
        drawn()  # leaves a second number of a pair with one rank alone
    path = engine.save(folder)
    on = [engine.train_step(batch).loss for batch in batches[3:]], drawn()
    other = make(dropout=0.2)
    other.load(path)
    again = [other.train_step(batch).loss for batch in batches[3:]], drawn()
    return on, again


def test_a_checkpoint_of_two_ranks_goes_on_bit_for_bit(ranks, tmp_path):
    (on, again), (other, other_again) = ranks(2, save_and_load, tmp_path)
    assert (on, other) == (again, other_again)
    assert on[0] == other[0]
    assert on[1] != other[1], "each rank draws as it did"


def unlike(folder):
    one = 1 + groups.rank()
    for options, told in (
        ({"accumulate": one}, "'accumulate' is 1 on rank 0 but 2 on rank 1"),
        ({"clip": 1.0 / one}, "'clip' is 1.0 on rank 0 but 0.5 on rank 1"),
        (
            {"schedule": Schedule(kind="constant", warmup=one)},
            r"'schedule' is \{.*'warmup': 1.*\} on rank 0 but \{.*'warmup': 2",
        ),
    ):
        with pytest.raises(DistributedError, match=f"lz.Engine: {told}"):
            make(**options)
    model = Tiny()
    told = "'option lr of group 0 of the optimizer' is 0.01 on rank 0 but 0.02 on rank 1"
    with pytest.raises(DistributedError, match=told):
        Engine(model, AdamW(model, lr=0.01 * one))
    with pytest.raises(ConfigError, match="wrapped by DistributedDataParallel"):
        Engine(torch.nn.parallel.DistributedDataParallel(model), AdamW(model))
    wide = torch.nn.Linear(4, one)
    with pytest.raises(DistributedError, match=r"weight of the model' is .*on rank 0 but \[\[2"):
        Engine(wide, AdamW(wide))
    with pytest.raises(DistributedError, match=r"lz train: 'train.lr' is 0.01 on rank 0 but 0.02"):
        Trainer(config(folder, train__lr=0.01 * one)).run()


def test_ranks_that_were_given_other_options_are_told_which(ranks, tmp_path):
    settings(tmp_path)
    ranks(2, unlike, tmp_path)


def elsewhere(folder):
    data = settings(folder)["data"]
    if groups.rank():
        data["train"] = ["its/own/path.txt"]
    return Trainer(config(folder, data=data, train__steps=2)).run().step


def test_ranks_may_know_the_data_by_other_paths(ranks, filled_cache, tmp_path):
    settings(tmp_path)
    assert ranks(2, elsewhere, tmp_path, env={"LEZERO_CACHE": str(filled_cache)}) == [2, 2]


class Signalled(Callback):
    def on_step(self, trainer, result):
        if groups.rank() == 1 and result.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def signalled(folder):
    result = Trainer(config(folder, train__steps=6), [Signalled()]).run()
    return result.step, result.exit_status


def test_a_signal_to_one_rank_ends_the_run_of_all_with_its_status(ranks, filled_cache, tmp_path):
    settings(tmp_path)
    env = {"LEZERO_CACHE": str(filled_cache)}
    assert ranks(2, signalled, tmp_path, env=env) == [(3, 143), (3, 143)]
