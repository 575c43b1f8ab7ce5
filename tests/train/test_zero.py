"""The engine on a sharded model: the same sums, decisions and ends as on a plain one."""

from __future__ import annotations

import gc
import json
import weakref

import numpy as np
import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.errors import ConfigError, OrderError
from lezero.models import Transformer, TransformerConfig
from lezero.optim import AdamW
from lezero.parallel.zero import Zero, fsdp, full_parameters, shard_, sharding_of
from lezero.train import Trainer
from lezero.train.engine import Engine
from lezero.train.gradients import wires
from lezero.train.loss import next_token_loss
from tests.train.runs import TEXT, config, filled_cache, settings
from tests.train.test_distributed import (
    ROWS,
    STEPS,
    Poisoned,
    Tiny,
    assert_agree,
    global_batches,
    mine,
    plain_masked_mean,
)
from tests.train.test_distributed import train as train_plain

__all__ = ["filled_cache"]
STAGES = (0, 1, 2, 3)


def make(stage, dtype=torch.float64, wire=None, zero=None, model=None, **options):
    torch.manual_seed(0)
    model = model or Tiny(options.pop("dropout", 0.0)).to(dtype)
    if stage is not None:
        shard_(model, zero or Zero(stage=stage), wire=wire)
    options = {"compile": "off", "attention": "torch", "loss": next_token_loss, **options}
    return Engine(model, AdamW(model, lr=1e-2), **options)


def whole(engine):
    return {name: p.clone().numpy() for name, p in full_parameters(engine.model)}


def steps(engine, masked_rows=(), count=STEPS):
    results = [engine.train_step(mine(batch)) for batch in global_batches(count, masked_rows)]
    assert not any(r.skipped for r in results), results[0].skipped
    return [(r.loss, r.grad_norm, r.tokens) for r in results], whole(engine)


def every_stage(accumulate, masked_rows, plain_mean):
    loss = plain_masked_mean if plain_mean else next_token_loss
    return [
        steps(make(stage, accumulate=accumulate, clip=0.3, loss=loss), masked_rows)
        for stage in STAGES
    ]


@pytest.mark.parametrize(
    ("accumulate", "masked_rows", "plain_mean"),
    [(1, (), False), (3, (0, 1, 6, 7, 10, 11), False), (2, tuple(range(6, 12)), True)],
    ids=["plain", "masked-micro-batches", "masked-rank-of-nan"],
)
def test_every_stage_agrees_with_one_process(ranks, accumulate, masked_rows, plain_mean):
    alone = train_plain(1, masked_rows, plain_mean)
    for rank in ranks(2, every_stage, accumulate, masked_rows, plain_mean):
        for found in rank:
            assert_agree(alone, found)


def over_fsdp2(accumulate, masked_rows):
    fsdp.fits = lambda *_: True
    engine = make(3, accumulate=accumulate, clip=0.3, loss=plain_masked_mean)
    assert isinstance(sharding_of(engine.model), fsdp.FsdpSharding)
    return steps(engine, masked_rows)


@pytest.mark.parametrize(("accumulate", "masked_rows"), [(2, range(6, 12)), (3, (0, 1, 6, 7))])
def test_fsdp2_agrees_where_nothing_counts(ranks, accumulate, masked_rows):
    """Masked means over nothing are 0 / 0."""
    alone = train_plain(1, tuple(masked_rows), True)
    for found in ranks(2, over_fsdp2, accumulate, tuple(masked_rows)):
        assert_agree(alone, found)


def fp32_stages():
    """Rows on a rank fill the vectors of torch's AdamW (see docs/zero.md)."""
    config = TransformerConfig(vocab=32, dim=32, layers=2, heads=2, ffn=32, context=32)
    return [steps(make(s, clip=0.3, model=Transformer(config)), count=10) for s in STAGES]


def test_stages_agree_bit_for_bit(ranks):
    first, *others = ranks(2, fp32_stages)[1]
    for losses, weights in others:
        assert losses == first[0]
        assert all((weights[name] == value).all() for name, value in first[1].items())


def one_bad_rank(stage):
    torch.manual_seed(0)
    model = Tiny().double()
    model.layers[1] = Poisoned(8, 8).double()
    engine = make(stage, model=model, max_skipped=3, clip=1.0)
    batches = [mine(b) for b in global_batches(6)]
    told = [engine.train_step(batches[0]).skipped]
    before = whole(engine)
    model.layers[1].poison = groups.rank() == 1
    told.append(engine.train_step(batches[1]).skipped)
    untouched = all((before[name] == value).all() for name, value in whole(engine).items())
    model.layers[1].poison = False
    told.append(engine.train_step(batches[2]).skipped)
    model.layers[1].poison = groups.rank() == 1
    for batch in batches[3:5]:
        engine.train_step(batch)
    with pytest.raises(ArithmeticError, match="step 3 in a row"):
        engine.train_step(batches[5])
    return told, untouched


@pytest.mark.parametrize("stage", [1, 3])
def test_a_non_finite_value_on_one_rank_skips_the_step_on_all(ranks, stage):
    first, second = ranks(2, one_bad_rank, stage)
    assert first == second
    told, untouched = first
    assert told[0] is told[2] is None
    assert "output of module 'layers.1'" in told[1]
    assert "(rank 1)" in told[1]
    assert untouched


def uneven():
    engine = make(3)
    batches = list(global_batches(5))
    own = batches[:4] if groups.rank() == 0 else batches[4:]
    with pytest.raises(ConfigError, match="a rank has no batch"):
        engine.evaluate(batches if groups.rank() else [])
    value = engine.evaluate(own)
    with pytest.raises(ConfigError, match="no batch to evaluate, on any rank"):
        engine.evaluate([])

    def stopping():
        for batch in batches:
            yield batch
            if groups.rank() == 1:
                engine.request_stop()

    assert engine.evaluate(stopping()) is None
    return value


def test_evaluation_under_stage_3_over_uneven_numbers_of_batches(ranks):
    torch.manual_seed(0)
    model = Tiny().double()
    alone = Engine(model, AdamW(model), loss=next_token_loss, precision="fp32", compile="off")
    expected = alone.evaluate(list(global_batches(5)))
    for value in ranks(2, uneven):
        assert abs(value - expected) < 1e-12


def evaluated(stage, folder):
    """Right after a step, after a load and in inference mode: rank 1 has nothing that counts."""
    engine = make(stage)
    batches = [mine(batch) for batch in global_batches(4)]
    nothing = {**batches[0], "targets": torch.full_like(batches[0]["targets"], -100)}
    own = batches[1:3] if groups.rank() == 0 else [nothing, nothing]
    without = own if groups.rank() == 0 or stage == 3 else []  # which stage 3 does not allow
    with torch.inference_mode():
        values = [engine.evaluate(own)]
    engine.train_step(batches[3])
    values += [engine.evaluate(own), engine.evaluate(without)]
    engine.save(folder / str(stage))
    engine.load(folder / str(stage))
    values.append(engine.evaluate(without))
    engine.train_step(batches[3])
    values.append(engine.evaluate(without))
    return values


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_where_nothing_counts_on_one_rank(ranks, tmp_path, stage):
    engine = make(None)
    *_, last = batches = list(global_batches(4))
    counted = [{k: v[: ROWS // 2] for k, v in batch.items()} for batch in batches[1:3]]
    before = engine.evaluate(counted)
    engine.train_step(last)
    once = engine.evaluate(counted)
    engine.train_step(last)
    expected = [before, *[once] * 3, engine.evaluate(counted)]
    for values in ranks(2, evaluated, stage, tmp_path):
        assert values == pytest.approx(expected, abs=1e-10)


def losses_of(stage, accumulate):
    return steps(make(stage, accumulate=accumulate, dropout=0.3), count=8)[0]


def test_ranks_times_accumulation_is_what_counts(ranks):
    alone = losses_of(2, 6)
    for stage, (world, accumulate) in ((1, (2, 3)), (3, (3, 2))):
        for found in ranks(world, losses_of, stage, accumulate):
            for a, b in zip(found, alone, strict=True):
                assert a == pytest.approx(b, abs=1e-10)


def choices():
    config = TransformerConfig(vocab=32, dim=16, layers=3, heads=2, ffn=32, context=32)
    torch.manual_seed(0)
    model = shard_(Transformer(config), Zero(stage=3, compute="bf16"))
    engine = Engine(model, AdamW(model), loss=next_token_loss, total_steps=50)
    tokens = torch.randint(0, 32, (2, 8))
    losses = [engine.train_step({"tokens": tokens, "targets": tokens}).loss for _ in range(8)]
    with pytest.raises(OrderError, match="sharded to compute in bf16"):
        engine.set_precision("fp32")
    return engine.decisions.to_json(), losses


def test_what_is_measured_is_measured_by_all_ranks(ranks):
    first, second = ranks(2, choices)
    assert first == second
    topics = {d["topic"]: d for d in first[0]["decisions"]}
    assert topics["precision"]["chosen"] == "bf16"
    assert topics["compile"]["candidates"]["eager"]["predicted s for the run"] > 0
    assert first[1][-1] < first[1][0]


def misuse():
    model = Tiny()
    early = AdamW(model)
    shard_(model, Zero(stage=2))
    with pytest.raises(OrderError, match="built before sharding"):
        Engine(model, early)
    later = AdamW(model)
    with pytest.raises(ConfigError, match="sharded to compute in fp32"):
        Engine(model, later, precision="bf16")
    with pytest.raises(ConfigError, match="fp16 needs a loss scale"):
        Engine(model, later, precision="fp16")
    outer = nn.Sequential(model)
    with pytest.raises(OrderError, match="only a part of the model is sharded"):
        Engine(outer, AdamW(outer))
    with torch.device("meta"):
        lazy = Tiny()
    shard_(lazy, Zero(stage=3))
    optimizer = AdamW(lazy, foreach=True)
    with pytest.raises(OrderError, match="on meta"):
        Engine(lazy, optimizer)


def test_misuse_is_told_on_every_rank(ranks):
    ranks(2, misuse)


def errors(engine):
    """Worker errors of this rank by parameter, whole and flat."""
    feedback = wires(engine.model)["shard"].feedback
    found = {}
    for key, data in feedback.state_dict().items():
        side, rest = key.split(":", 1)[0], key.split("/", 1)[1]
        name, start = rest.rsplit("/", 1)
        size = engine.model.get_parameter(name).numel()
        whole = found.setdefault((side, name), torch.zeros(size))
        whole[int(start) : int(start) + data.numel()] = data
    return {key: value.numpy() for key, value in found.items()}


def with_feedback(folder, load):
    engine = make(2, torch.float32, wire=Wire(codec="int4", feedback="worker", topology="flat"))
    if load:
        engine.load(folder)
        now = errors(engine)
        engine.train_step(mine(next(global_batches(1))))
        return now
    steps(engine, count=3)
    engine.save(folder)
    return errors(engine)


def test_pending_errors_survive_another_number_of_ranks(ranks, tmp_path):
    saved = ranks(4, with_feedback, tmp_path, False)
    mean = {
        key: np.mean([rank[key].astype(np.float64) for rank in saved], axis=0).astype(np.float32)
        for key in saved[0]
    }
    assert any(value.any() for value in mean.values())
    for loaded in ranks(2, with_feedback, tmp_path, True):
        for key, value in mean.items():
            assert np.array_equal(loaded[key], value), key
    for rank, loaded in enumerate(ranks(4, with_feedback, tmp_path, True)):
        assert all(np.array_equal(loaded[key], value) for key, value in saved[rank].items())


def run(folder, steps, stage):
    schedule = {"kind": "constant"}  # which does not know where the run ends
    made = config(
        folder, train__steps=steps, train__schedule=schedule, zero={"stage": stage},
        checkpoint={"every": 3},
    )  # fmt: skip
    return Trainer(made).run().loss


def test_a_run_goes_on_with_other_ranks_at_another_stage(ranks, filled_cache, tmp_path):
    env = {"LEZERO_CACHE": str(filled_cache)}
    (tmp_path / "alone").mkdir()
    alone = ranks(1, run, tmp_path / "alone", 9, 0, env=env)[0]
    ranks(2, run, tmp_path, 5, 3, env=env)
    for loss in ranks(4, run, tmp_path, 9, 1, env=env):
        assert loss == pytest.approx(alone, rel=1e-5)


def unvalidated(folder, stage):
    made = config(folder, train__steps=3, zero={"stage": stage}, validation={"every": 0})
    return Trainer(made).run().step


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_ends_with_its_samples_also_when_it_was_complete(
    ranks, filled_cache, tmp_path, stage
):
    settings(tmp_path)
    env = {"LEZERO_CACHE": str(filled_cache)}
    sample = tmp_path / "run/sample.json"
    for _ in range(2):
        assert ranks(2, unvalidated, tmp_path, stage, env=env) == [3, 3]
        assert [one["prompt"] for one in json.loads(sample.read_text())] == ["The "]
        sample.unlink()


def validated(folder, stage):
    """A run whose last batch to validate on has rows for rank 0 only."""
    data = {**settings(folder)["data"], "validation": [str(folder / "held.txt")]}
    made = config(
        folder, run=str(folder / f"run-{stage}"), data=data, train__steps=2, zero={"stage": stage},
        validation={"every": 1}, model__layers=3,  # more than stage 3 holds whole at a time
    )  # fmt: skip
    trainer = Trainer(made)
    loss = trainer.run().validation_loss
    assert len(trainer.validation.rows) == 11
    return loss


def test_a_run_validates_on_rows_that_do_not_reach_every_rank(ranks, filled_cache, tmp_path):
    settings(tmp_path)
    (tmp_path / "held.txt").write_text(TEXT[:351], encoding="utf-8")
    env = {"LEZERO_CACHE": str(filled_cache)}
    alone = ranks(1, validated, tmp_path, 0, env=env)[0]
    for stage in (1, 3):
        for loss in ranks(2, validated, tmp_path, stage, env=env):
            assert loss == pytest.approx(alone, rel=1e-5)


def decided(accumulate, folder):
    """At which steps codec auto records a choice, in a run and in one that goes on from it."""
    found = []
    for _ in range(2):
        wire = Wire(codec="auto", topology="flat")
        engine = make(2, torch.float32, wire, accumulate=accumulate)
        if found:
            engine.load(folder)
            engine.decisions.replay.clear()
        steps(engine, count=6)
        made = engine.decisions.records["wire.shard"]
        found.append((made.step, wires(engine.model)["shard"].chooser._step))
        engine.save(folder)
        sharding_of(engine.model).close()
    return found


def test_codec_auto_counts_steps_not_backwards(ranks, tmp_path):
    assert ranks(2, decided, 2, tmp_path) == [[(4, 6), (10, 6)]] * 2


def freed():
    """Whether an engine is gone before its model, and what is counted in a step without one."""
    engine = make(2, torch.float32, Wire(codec="auto", topology="flat"))
    steps(engine, count=1)
    model, gone = engine.model, weakref.ref(engine)
    del engine
    gc.collect()
    next_token_loss(model, mine(next(iter(global_batches(1))))).backward()
    AdamW(model, lr=1e-2).step()
    chooser = wires(model)["shard"].chooser
    found = gone() is None, chooser._taken
    sharding_of(model).close()
    return found


def test_an_engine_with_codec_auto_is_freed_before_its_model(ranks):
    assert ranks(2, freed) == [(True, 2)] * 2
