"""From a config to the pieces of a run."""

from __future__ import annotations

import shutil
import sys
from unittest import mock

import pytest
import torch

from lezero import checkpoint
from lezero.core.errors import ConfigError, FileError, MissingExtraError
from lezero.data.tokenizer import train_tokenizer
from lezero.models import Transformer, TransformerConfig, load_hf
from lezero.models.hf_writing import save_hf
from lezero.optim import AdamW8bit
from lezero.parallel.zero import full_parameters, shard_
from lezero.train import Trainer, recipe
from lezero.train.config import RunConfig
from tests.train.runs import config, filled_cache, one_thread, settings

__all__ = ["filled_cache", "one_thread"]

SHAPE = {"vocab": 64, "dim": 32, "layers": 2, "heads": 2, "ffn": 48, "context": 32}
TOKENS = torch.arange(8)[None]


def from_folder(folder, stage):
    """A run's first model: whether it had no memory yet when it was split, its values, logits."""
    made = config(folder, model={"folder": str(folder / "model")}, zero={"stage": stage})
    on_meta = []

    def split(model, *arguments, **options):
        on_meta.append(all(p.is_meta for p in model.parameters()))
        return shard_(model, *arguments, **options)

    with mock.patch.object(recipe, "shard_", split):
        model = recipe.build_model(made, 64)
    with torch.no_grad():
        logits = model(TOKENS)
    return on_meta, {name: value.clone() for name, value in full_parameters(model)}, logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_split_model_from_a_folder_is_whole_on_no_rank(ranks, tmp_path, tied):
    settings(tmp_path)
    save_hf(Transformer(TransformerConfig(**SHAPE, tied=tied)).bfloat16(), tmp_path / "model")
    expected = load_hf(tmp_path / "model", torch.float32)
    for stage in (0, 3):
        for on_meta, values, logits in ranks(2, from_folder, tmp_path, stage):
            assert on_meta == [True]
            assert values.keys() == dict(expected.named_parameters()).keys()
            for name, value in expected.named_parameters():
                assert torch.equal(values[name], value), name
            torch.testing.assert_close(logits, expected(TOKENS).detach())


def misfit(folder):
    with pytest.raises(FileError, match=r"do not fit: .*missing layers.1"):
        from_folder(folder, 3)


def test_weights_that_do_not_fit_a_split_model_are_named(ranks, tmp_path):
    settings(tmp_path)
    folder, other = tmp_path / "model", tmp_path / "other"
    save_hf(Transformer(TransformerConfig(**SHAPE)), folder)
    save_hf(Transformer(TransformerConfig(**{**SHAPE, "layers": 1})), other)
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    ranks(2, misfit, tmp_path)


def test_a_model_from_a_folder_is_trained_on_its_own_tokenizer(tmp_path):
    made = settings(tmp_path, model={"folder": str(tmp_path / "model")})
    chosen = made["data"].pop("tokenizer")
    save_hf(Transformer(TransformerConfig(**SHAPE)), tmp_path / "model")
    left_out = RunConfig.parse(made)
    with pytest.raises(ConfigError, match="model holds no tokenizer; copy the model's own"):
        recipe.check(left_out)
    taught = train_tokenizer(["a rose is a rose is a rose"] * 9, 300)
    taught.save(tmp_path / "model")
    recipe.check(left_out)
    again = RunConfig.parse(left_out.to_dict())
    for each in (left_out, again):
        assert recipe.build_data(each).tokenizer.digest == taught.digest
    for given in (chosen, {"train": 300}):
        made["data"]["tokenizer"] = given
        for refused in (recipe.check, recipe.plan_inputs):
            with pytest.raises(ConfigError, match=r"got (bytes|.train: 300.), .*leave data.token"):
                refused(RunConfig.parse(made))


def test_a_tokenizer_with_more_tokens_than_its_model_is_told_what_helps(tmp_path):
    folder, other = str(tmp_path / "model"), str(tmp_path / "other")
    save_hf(Transformer(TransformerConfig(**SHAPE)), tmp_path / "model")
    for place, advice in ((folder, r"own tokenizer into .*embeddings\(70\)"), (other, "use the")):
        made = config(tmp_path, model={"folder": folder}, data__tokenizer={"folder": place})
        with pytest.raises(ConfigError, match=f"has 64 tokens and the tokenizer 70; .*{advice}"):
            recipe.model_config(made, 70)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_validation_passes_are_micro_batches_of_the_same_rows(tmp_path, accumulate):
    made = config(tmp_path, train={"batch": 8, "accumulate": accumulate})
    data = recipe.build_data(made)
    _, whole = recipe.loaders(config(tmp_path, train={"batch": 8}), data)
    _, cut = recipe.loaders(made, data)
    passes = [batch["tokens"] for batch in cut]
    assert {len(tokens) for tokens in passes} == {made.micro_batch(1)}
    assert torch.equal(torch.cat(passes), torch.cat([batch["tokens"] for batch in whole]))


def test_the_order_of_the_rows_is_that_of_the_datas_seed(tmp_path):
    """Which is the same under another seed of the weights."""
    made = config(tmp_path, data__seed=5, train__seed=7)
    loader, _ = recipe.loaders(made, recipe.build_data(made))
    assert loader.order.seed == 5


def test_what_is_missing_for_the_report_is_said_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"lezero\[tensorboard\]"):
        recipe.check(config(tmp_path, report={"tensorboard": True}))


def test_the_last_checkpoint_is_in_the_forecast_where_there_is_no_other(tmp_path):
    _, spec = recipe.plan_inputs(config(tmp_path, checkpoint={"every": 0}), 64)
    assert spec.saves


@pytest.mark.usefixtures("one_thread")
def test_a_run_goes_on_with_masters_as_its_weights(tmp_path):
    """And refuses another optimizer, which cannot read the state."""
    few = {"zero": {"stage": 0}, "train__precision": "bf16", "report": {"samples": []}}
    before = config(tmp_path, **few, train__masters="fp32", train__steps=2)
    Trainer(before).run()
    kept = checkpoint.load(tmp_path / "run")
    exact = {n.split("/", 1)[1]: t for n, t in kept.tensors.items() if n.endswith("master")}
    now = config(tmp_path, **few, train__steps=2)
    assert recipe.lost_state(now.train, before.train.to_dict()) == ""
    trainer = Trainer(now)
    trainer.run()
    weights = dict(full_parameters(trainer.model))
    assert len(exact) == len(weights)
    total = sum(float(value.double().sum()) for value in exact.values())
    assert sum(float(w.double().sum()) for w in weights.values()) == pytest.approx(total, rel=1e-9)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    other = now.train.model_copy(update={"optimizer": "adamw8bit"})
    assert recipe.lost_state(other, now.train.to_dict()) == "train.optimizer: adamw → adamw8bit"


@pytest.mark.usefixtures("without_accelerator")
def test_the_step_that_is_forecast_is_the_one_of_the_config(tmp_path):
    train = {"steps": 7, "batch": 12, "accumulate": 3, "pool": False, "clip": None}
    made = config(tmp_path, train={**train, "precision": "bf16", "optimizer": "adamw8bit"})
    build, spec = recipe.plan_inputs(made, 64, world=2)
    assert (spec.batch, spec.accumulate, spec.ranks, spec.steps) == (2, 3, 2, 7)
    assert (spec.tokens, spec.precision, spec.pool, spec.clip) == (32, "bf16", False, False)
    assert spec.saves, "each run writes its last generation"
    assert isinstance(spec.make_optimizer(build()), AdamW8bit)
    _, usual = recipe.plan_inputs(config(tmp_path), 64, world=1)
    assert (usual.batch, usual.pool, usual.clip) == (8, True, True)
