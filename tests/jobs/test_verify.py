"""A healthy run is not accused, and every seeded fault is caught and named."""

import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lezero.core.errors import ConfigError, NumericsError
from lezero.data import Loader
from lezero.jobs.plain_loop import global_batch, learning_rate
from lezero.jobs.verification import read
from lezero.jobs.verify import verify
from lezero.optim import AdamW, Schedule
from lezero.train import RunConfig, engine_state, recipe
from lezero.train import engine as engine_module
from lezero.train.config import TrainConfig
from lezero.train.engine import Engine

STEPS = 4


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Pairs of unequal length, so that every micro-batch counts another number of tokens."""
    folder = tmp_path_factory.mktemp("verify")
    draw = random.Random(0)
    lines = []
    for _ in range(60):
        words = [draw.choice(["lorem", "ipsum", "dolor", "sit"]) for _ in range(9)]
        cut = draw.randint(1, 8)
        pair = {"prompt": " ".join(words[:cut]), "response": " ".join(words[cut:])}
        lines.append(json.dumps(pair))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    (folder / "cache").mkdir()
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors of these sizes only lose by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(text, monkeypatch, tmp_path):
    monkeypatch.setenv("LEZERO_CACHE", str(text / "cache"))
    return lambda **train: make(text, tmp_path, **train)


def make(text, run, **train):
    return RunConfig.parse(
        {
            "run": str(run / "run"),
            "model": {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "tied": False},
            "data": {
                "train": [str(text / "pairs.jsonl")], "validation": 0, "tokenizer": "bytes",
                "sequence": 48, "seed": 3,
            },
            "train": {
                "steps": 20, "batch": 4, "accumulate": 2, "lr": 1e-3, "clip": 1.0,
                "compile": "off", "precision": "fp32", "pool": False, **train,
            },
        }
    )  # fmt: skip


# healthy runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "train",
    [
        {"accumulate": 1, "clip": None},
        {"accumulate": 4, "clip": 0.1},
        {"precision": "bf16", "accumulate": 4},
        {"precision": "bf16", "accumulate": 1, "lr": 3e-2},
        {"precision": "fp16"},
        {"schedule": {"kind": "cosine", "warmup": 2}},
        {"schedule": {"kind": "wsd", "decay": 0.9}, "precision": "bf16"},
        {"schedule": {"kind": "linear", "final": 0.0}, "steps": 4},
        {"schedule": {"kind": "constant", "warmup": 3}, "weight_decay": 0.0, "betas": (0.0, 0.999)},
    ],
    ids=lambda train: "-".join(map(str, train.values())),
)
def test_a_healthy_run_is_within_tolerance(run, train):
    found = verify(run(**train), STEPS).require()
    assert found.verdict == "within tolerance"
    assert found.ok
    assert found.first is None
    assert (found.steps, found.resumed_after, found.ranks) == (STEPS, STEPS // 2, 1)
    assert "bit for bit as uninterrupted" in found.resume
    assert 0 < found.gradient.share < 0.75, "close to accusing a run that is right"
    assert found.update.share < 0.75
    assert found.loss.share < 0.75
    assert found.figures[0].loss == pytest.approx(found.figures[0].plain_loss, rel=1e-4)


def test_compiled_blocks_are_within_tolerance(ranks, text, tmp_path):
    env = {"LEZERO_CACHE": str(text / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ((verdict, first, _, resume, form),) = ranks(
        1, rank_verifies, text, tmp_path, None, 2, timeout_s=240, env=env, compile="blocks"
    )
    assert (verdict, first, form) == ("within tolerance", "None", "blocks")
    assert "bit for bit as uninterrupted" in resume


def test_an_engine_of_the_same_operations_is_equal(run, monkeypatch):
    def loss(model, batch):
        logits = model(batch["tokens"]).flatten(0, 1)
        each = F.cross_entropy(logits, batch["targets"].flatten(), reduction="none")
        return each.sum() / (batch["targets"] != -100).sum()

    def optimizer(config, model):
        train = config.train
        return AdamW(
            model, lr=train.lr, betas=train.betas, eps=train.eps,
            weight_decay=train.weight_decay, foreach=False,
        )  # fmt: skip

    monkeypatch.setattr(recipe, "next_token_loss", loss)
    monkeypatch.setattr(recipe, "build_optimizer", optimizer)
    found = verify(run(accumulate=1, clip=None), STEPS)
    assert found.verdict == "equal"
    assert found.drift == 0
    assert found.summary.startswith("Equal: 4 steps in fp32 are bit for bit")
    assert all(one.loss == one.plain_loss for one in found.figures)


def test_the_plain_loop_in_pieces_is_the_plain_loop(run):
    whole, pieces = verify(run(), 2), verify(run(), 2, at_once=1)
    assert pieces.ok
    for a, b in zip(whole.figures, pieces.figures, strict=True):
        assert a.plain_loss == pytest.approx(b.plain_loss, rel=1e-6)


def test_one_step_has_no_resume_and_bad_counts_are_refused(run):
    found = verify(run(), 1)
    assert found.ok
    assert found.resumed_after is None
    assert "not checked" in found.resume
    for bad in ({"steps": 0}, {"at_once": -1}):
        with pytest.raises(ConfigError, match="allowed is"):
            verify(run(), **bad)


# seeded faults -----------------------------------------------------------------------------


def weighted(weight, micros_of=lambda micros: micros):
    """Engine._backward with another weight for each micro-batch."""

    def backward(self, micros, counts, total):
        summed = 0.0
        used = micros_of(list(zip(micros, counts, strict=True)))
        for micro, count in used:
            with self.precision.autocast():
                loss = self.loss(self.model, micro)
            (loss * weight(count, total, len(micros))).backward()
            summed += float(loss.detach()) * count
        return summed / sum(count for _, count in used)

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

    def built(config, vocab):
        model = build(config, vocab)
        model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        return model

    patch.setattr(recipe, "build_model", built)


def late(set_lr):
    """The engine reports the right rate and trains with another one."""

    def changed(self):
        lr = set_lr(self)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * 1.01
        return lr

    return changed


def unclipped(update):
    def changed(self, *arguments):
        self.clip = None
        return update(self, *arguments)

    return changed


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


def skips_a_step(patch):
    seen = []

    def finite(value):
        seen.append(value)
        return len(seen) != 2  # the norm of the first step

    patch.setattr(engine_module, "_is_finite", finite)
    patch.setattr(Engine, "_culprit", lambda self, micros: "nowhere")


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
    "parameter: not in the optimizer": (optimizer_made(forget(UP)), "update", 1, UP),
    "parameter: frozen": (frozen, "gradient", 1, "layers.0.mlp.up_proj.weight"),
    "resume: data order shifted": (loader_method("seek", shifted), "resume: data order", 3, None),
    "resume: data order reseeded": (loader_method("seek", reseeded), "resume: data order", 3, None),
    "resume: moments lost": (
        forgets("moments"), "resume: state", 3, f"{FIRST} (exp_avg)",
    ),
    "resume: step lost": (forgets("step"), "resume: learning rate", 3, None),
    "resume: clips otherwise": (forgets("seed"), "resume: parameters", 3, FIRST),
    "data order: a batch repeats": (loader_method("__next__", repeats), "data order", 4, None),
    "schedule: one step ahead": (
        engine_method("_set_lr", one_step_ahead), "learning rate", 1, None,
    ),
    "schedule: told, not done": (engine_method("_set_lr", late), "update", 1, FIRST),
    "decay: norms too": (optimizer_made(decay_everything), "update", 1, FIRST),
    "betas: swapped": (
        optimizer_made(lambda _, made: made.param_groups[0].update(betas=(0.95, 0.9))),
        "update", 2, "layers.0.self_attn.q_proj.weight",
    ),
    "clip: ignored": (
        engine_method("_update", unclipped), "clipping", 1, FIRST,
    ),
    "gradients: kept from the step before": (
        lambda patch: patch.setattr(AdamW, "zero_grad", lambda *a, **k: None), "gradient", 2, FIRST,
    ),
    "norm: reported wrong": (
        engine_method("_gradient_norm", lambda made: lambda self: 1.001 * made(self)),
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


def rank_verifies(text, folder, fault, steps, **train):
    if fault is not None:
        fault(pytest.MonkeyPatch())  # a rank is a process of its own and ends after this
    found = verify(make(text, folder, **train), steps)
    return found.verdict, str(found.first), found.ranks, found.resume, found.form


def never_meet(patch):
    patch.setattr(Engine, "_sync", lambda self, last: self._wrapped.no_sync())


def second_rank_reads_elsewhere(patch):
    mine = Loader.mine

    def changed(self, start):
        return mine(self, start + self.rank)

    patch.setattr(Loader, "mine", changed)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_ranks_against_one_plain_loop(ranks, text, tmp_path, precision):
    env = {"LEZERO_CACHE": str(text / "cache")}
    for verdict, _, count, resume, _ in ranks(
        2, rank_verifies, text, tmp_path, None, STEPS, env=env, precision=precision
    ):
        assert (verdict, count) == ("within tolerance", 2)
        assert "bit for bit" in resume


def test_faults_of_two_ranks(ranks, text, tmp_path):
    env = {"LEZERO_CACHE": str(text / "cache")}
    for _, first, *_ in ranks(2, rank_verifies, text, tmp_path, never_meet, 1, env=env):
        assert first.startswith("step 1, gradient of embed_tokens.weight")
    told = ranks(2, rank_verifies, text, tmp_path, second_rank_reads_elsewhere, 1, env=env)
    for _, first, *_ in told:
        assert first == "step 1, data order: where sample 2 belongs, there is sample 3 (rank 1)"


# the plain loop's own rules ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 10), (3, 10), (10, 10), (15, 10)])
def test_the_written_out_learning_rate_is_the_schedule(kind, warmup, total):
    schedule = Schedule(kind=kind, warmup=warmup, final=0.2)
    train = TrainConfig(lr=0.5, steps=total, schedule=schedule)
    for step in range(total):
        assert math.isclose(learning_rate(train, step), 0.5 * schedule.factor(step, total))
    if warmup < total and kind != "constant":
        assert math.isclose(learning_rate(train, total - 1), 0.1)


def test_the_written_out_order_is_the_loaders(run):
    data = recipe.build_data(run())
    loader = Loader(data.train, 8, seed=5)
    for step in range(20):
        batch = next(loader)
        tokens, targets = global_batch(data.train, 5, 8, step)
        assert torch.equal(batch["tokens"], tokens)
        assert torch.equal(batch["targets"], targets)


# the record --------------------------------------------------------------------------------


def test_the_record_is_what_the_report_reads(run):
    config = run()
    found = verify(config, 2)
    assert found.write(config.run) is None
    folder = Path(config.run)
    folder.mkdir()
    path = found.write(folder)
    assert path == folder / "verify.json"
    data = json.loads(path.read_text())
    assert data["format"] == 1
    assert data["ok"] is True
    assert data["verdict"] == found.summary
    assert len(data["losses"]) == len(data["plain_losses"]) == 2
    assert [p.name for p in folder.iterdir()] == ["verify.json"]


def test_the_record_travels(run, monkeypatch):
    MEANS(monkeypatch)
    found = verify(run(), 2)
    assert read(json.loads(json.dumps(asdict(found)))) == found
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["ok"] is False
