"""Every seeded fault is caught and named: check, step and parameter."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from lezero.core import groups
from lezero.core.errors import NumericsError
from lezero.data import Loader
from lezero.jobs.verification import read
from lezero.jobs.verify import verify
from lezero.train import engine as engine_module
from lezero.train import engine_state, recipe
from lezero.train.engine import Engine
from lezero.train.gradients import Replicated
from tests.jobs.verify_runs import STEPS, rank_verifies_each

pytestmark = pytest.mark.usefixtures("without_accelerator")  # there a resume is bit for bit


def weighted(weight, micros_of=lambda micros: micros):
    """Engine._backward with another weight for each micro-batch."""

    def backward(self, form, micros, counts, total):
        summed = 0.0
        used = micros_of(list(zip(micros, counts, strict=True)))
        for micro, count in used:
            with self.precision.autocast():
                loss = self.loss(self.model, micro)
            (loss * weight(count, total, len(micros))).backward()
            summed += float(loss.detach()) * count
        return summed / sum(count for _, count in used) * total  # the engine divides

    return lambda patch: patch.setattr(Engine, "_backward", backward)


def engine_method(name, change):
    """`change(original)` in place of a method of the engine."""
    return lambda patch: patch.setattr(Engine, name, change(getattr(Engine, name)))


def optimizer_made(change):
    """`change(model, optimizer)` on the optimizer before the engine gets it."""

    def seed(patch):
        build = recipe.build_optimizer

        def built(config, model):
            optimizer = build(config, model)
            change(model, optimizer)
            return optimizer

        patch.setattr(recipe, "build_optimizer", built)

    return seed


def forget(name):
    def change(model, optimizer):
        lost = dict(model.named_parameters())[name]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not lost]

    return change


def loader_method(name, change):
    return lambda patch: patch.setattr(Loader, name, change(getattr(Loader, name)))


def shifted(seek):
    def changed(self, state):
        seek(self, state)
        self.samples += 1

    return changed


def reseeded(seek):
    def changed(self, state):
        seek(self, state)
        self.order = type(self.order)(self.order.seed + 1, self.order.length)

    return changed


def repeats(following):
    """The loader forgets to go on after its second batch."""

    def changed(self):
        batch = following(self)
        if self.samples == 3 * self.batch:
            self.samples -= self.batch
        return batch

    return changed


def decay_everything(model, optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1


def frozen(patch):
    build = recipe.build_model

    def built(config, vocab, decisions):
        model = build(config, vocab, decisions)
        model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        return model

    patch.setattr(recipe, "build_model", built)


def late(factor):
    """The engine reports the right rate and trains with another one."""

    def change(set_lr):
        def changed(self):
            lr = set_lr(self)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * factor
            return lr

        return changed

    return change


def clipped_at(limit):
    def change(update):
        def changed(self, *arguments):
            self.clip = limit
            return update(self, *arguments)

        return changed

    return change


def one_step_ahead(set_lr):
    def changed(self):
        self.step += 1
        lr = set_lr(self)
        self.step -= 1
        return lr

    return changed


def forgets(*keys):
    """A resume that does not bring back part of the state."""

    def seed(patch):
        restore = engine_state.restore

        def changed(engine, loaded):
            documents = restore(engine, loaded)
            for state in engine.optimizer.state.values() if "moments" in keys else ():
                state["exp_avg"].zero_()
            if "step" in keys:
                engine.step -= 1
            if "seed" in keys:
                engine.clip = 1e-3
            return documents

        patch.setattr(engine_state, "restore", changed)

    return seed


def counts_twice(train_step):
    def changed(self, batch):
        result = train_step(self, batch)
        return replace(result, tokens=2 * result.tokens)

    return changed


def tells_another_loss(patch):
    """After a resume, of which all else is right."""
    restore = engine_state.restore

    def changed(engine, loaded):
        backward = engine._backward
        engine._backward = lambda *given: 1.001 * backward(*given)
        return restore(engine, loaded)

    patch.setattr(engine_state, "restore", changed)


def keeps_gradients(patch):
    for place in ("engine", "gradients"):
        patch.setattr(f"lezero.train.{place}.drop_gradients", lambda model: None)


def skips_a_step(patch):
    seen = []

    def finite(value):
        seen.append(value)
        return len(seen) != 2  # the norm of the first step

    patch.setattr(engine_module, "math", SimpleNamespace(isfinite=finite))
    patch.setattr("lezero.train.engine.find_on_all", lambda engine, micros: "nowhere")


MEANS = weighted(lambda count, total, parts: 1 / parts)
UNDIVIDED = weighted(lambda count, total, parts: 1.0)
FIRST, UP = "embed_tokens.weight", "layers.1.mlp.up_proj.weight"
NORM = "layers.0.input_layernorm.weight"

FAULTS = {
    "accumulation: mean of means": (MEANS, "gradient", 1, FIRST),
    "accumulation: not divided": (UNDIVIDED, "gradient", 1, FIRST),
    "accumulation: last micro-batch lost": (
        weighted(lambda count, total, parts: count / total, lambda pairs: pairs[:-1]),
        "loss", 1, None,
    ),
    "loss: reported as the sum": (
        engine_method("_backward", lambda made: lambda *a: 2 * made(*a)), "loss", 1, None,
    ),
    "parameter: not in the optimizer": (optimizer_made(forget(UP)), "optimizer", 1, UP),
    "parameter: frozen": (frozen, "gradient", 1, "layers.0.mlp.up_proj.weight"),
    "resume: data order shifted": (loader_method("seek", shifted), "resume: data order", 3, None),
    "resume: data order reseeded": (loader_method("seek", reseeded), "resume: data order", 3, None),
    "resume: moments lost": (
        forgets("moments"), "resume: state", 3, f"{FIRST} (exp_avg)",
    ),
    "resume: step lost": (forgets("step"), "resume: learning rate", 3, None),
    "resume: clips otherwise": (forgets("seed"), "resume: parameters", 3, FIRST),
    "data order: a batch repeats": (loader_method("__next__", repeats), "data order", 4, None),
    "resume: another loss": (tells_another_loss, "resume: loss", 3, None),
    "tokens: counted twice": (engine_method("train_step", counts_twice), "tokens", 1, None),
    "schedule: one step ahead": (
        engine_method("_set_lr", one_step_ahead), "learning rate", 1, None,
    ),
    "schedule: told, not done": (engine_method("_set_lr", late(1.01)), "update", 1, FIRST),
    "decay: norms too": (optimizer_made(decay_everything), "optimizer", 1, FIRST),
    "betas: swapped": (
        optimizer_made(lambda _, made: made.param_groups[0].update(betas=(0.95, 0.9))),
        "optimizer", 1, "layers.0.self_attn.q_proj.weight",
    ),
    "clip: ignored": (
        engine_method("_update", clipped_at(None)), "clipping", 1, FIRST,
    ),
    "clip: a little too far": (
        engine_method("_update", clipped_at(0.999)), "clipping", 1, FIRST,
    ),
    "gradients: kept from the step before": (keeps_gradients, "gradient", 2, FIRST),
    "norm: reported wrong": (
        engine_method("_gradient_norm", lambda made: lambda *a: 1.001 * made(*a)),
        "gradient norm", 1, None,
    ),
    "a finite step skipped": (skips_a_step, "skipped step", 1, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_named(run, monkeypatch, name):
    seed, check, step, parameter = FAULTS[name]
    seed(monkeypatch)
    found = verify(run(accumulate=4), STEPS)
    assert found.verdict == "parts"
    assert not found.ok
    assert found.first is not None
    assert (found.first.check, found.first.step, found.first.parameter) == (check, step, parameter)
    assert f"step {step}, {check}" in found.summary
    assert parameter is None or parameter in found.summary
    with pytest.raises(NumericsError, match=f"^parts from plain PyTorch at step {step}, {check}"):
        found.require()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_decay": 0.0}, "weight_decay is 0.0 here, 0.1 by"),
        ({"betas": (0.9, 0.999)}, "betas is (0.9, 0.999) here, (0.9, 0.95) by"),
        ({"eps": 1e-6}, "eps is 1e-06 here, 1e-08 by"),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_warm_up_hides_no_option(run, monkeypatch, change, said, optimizer):
    optimizer_made(lambda _, made: made.param_groups[0].update(change))(monkeypatch)
    found = verify(run(schedule={"warmup": 1000}, steps=2000, optimizer=optimizer), 1)
    assert found.first is not None
    assert found.first.check == "optimizer"
    assert said in found.summary


@pytest.mark.parametrize(
    "name",
    [
        "accumulation: mean of means", "accumulation: not divided", "decay: norms too",
        "parameter: not in the optimizer", "resume: data order shifted", "schedule: told, not done",
    ],
)  # fmt: skip
def test_bf16_hides_no_fault(run, monkeypatch, name):
    seed, check, step, parameter = FAULTS[name]
    seed(monkeypatch)
    found = verify(run(accumulate=4, precision="bf16"), STEPS)
    assert found.first is not None
    assert (found.first.check, found.first.step, found.first.parameter) == (check, step, parameter)


def test_8_bit_moments_hide_no_update_of_another_size(run, monkeypatch):
    engine_method("_set_lr", late(4.0))(monkeypatch)
    found = verify(run(optimizer="adamw8bit"), 1)
    assert found.first is not None
    assert found.first.check == "update"


def test_what_is_said_of_a_fault(run, monkeypatch):
    UNDIVIDED(monkeypatch)
    found = verify(run(accumulate=4), 2)
    assert "and 20 more" in found.summary
    assert "loss difference" in found.summary
    assert "its norm is" in found.summary


def test_what_is_said_of_moved_samples(run, monkeypatch):
    loader_method("seek", shifted)(monkeypatch)
    found = verify(run(), STEPS)
    assert "where sample 8 belongs, there is sample 9" in found.summary


# several ranks -----------------------------------------------------------------------------


def never_meet(patch):
    micro = Replicated.micro
    patch.setattr(
        Replicated, "micro", lambda self, counts, last: micro(self, counts=counts, last=False)
    )


def second_rank_reads_elsewhere(patch):
    mine = Loader.mine

    def changed(self, start):
        return mine(self, start + self.rank)

    patch.setattr(Loader, "mine", changed)


def second_rank_goes_further(patch):
    engine_method("_set_lr", late(1.5 if groups.rank() else 1.0))(patch)


def test_faults_of_two_ranks(ranks, text, tmp_path):
    faults = (never_meet, second_rank_reads_elsewhere, second_rank_goes_further)
    cases = [(fault, {}) for fault in faults]
    env = {"LEZERO_CACHE": str(text / "cache")}
    for told in ranks(2, rank_verifies_each, text, tmp_path, cases, 1, timeout_s=180, env=env):
        gradient, order, parted = [first for _, first, _ in told]
        assert gradient.startswith("step 1, gradient of embed_tokens.weight")
        assert order == "step 1, data order: where sample 2 belongs, there is sample 3 (rank 1)"
        assert parted.startswith("step 1, ranks of ")
        assert parted.endswith(": rank 1 has other values than rank 0")


def test_the_record_travels(run, monkeypatch):
    MEANS(monkeypatch)
    found = verify(run(), 2)
    assert read(json.loads(json.dumps(asdict(found)))) == found
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["ok"] is False
