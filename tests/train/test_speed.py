"""Which form a model runs in: chosen from figures, recorded, replayed, overridden, traceless."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.ops.attention import available
from lezero.optim import AdamW
from lezero.train import speed
from lezero.train.engine import Engine
from lezero.train.loss import next_token_loss
from lezero.train.precision import Precision

CPU = torch.device("cpu")
FIGURES = {"eager": (1.0, 1.0), "blocks": (10.0, 0.5), "step": (30.0, 0.4)}
"""Made-up seconds of the first micro-batch and of each other one."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.line(x).transpose(1, 2)).transpose(1, 2)))


class PlainBlock(nn.Module):
    """Quick to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.line(x))


class Model(nn.Module):
    def __init__(self, noisy: bool = False, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.noisy = noisy
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, tokens):
        if self.noisy:
            random.random(), np.random.random(), torch.rand(3)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 11, (2, 4, 8), generator=generator)
    return {"tokens": tokens, "targets": targets}


def choose(model, decisions=None, asked="auto", steps=1000):
    decisions = Decisions() if decisions is None else decisions
    form = speed.choose(
        model, next_token_loss, batch(), Precision("fp32", CPU), decisions, asked=asked,
        asked_attention="torch", steps=steps, accumulate=1, seed=0,
    )  # fmt: skip
    name = form.name
    form.undo()
    return name, decisions.records["compile"]


@pytest.fixture
def figures(monkeypatch):
    """The trial gives `FIGURES`, which a test may change; None fails, as a broken compiler does."""
    given = dict(FIGURES)

    def timed(self, form):
        if given[form.name] is None:
            raise RuntimeError("no C++ compiler found\nand more lines")
        return given[form.name]

    monkeypatch.setattr(speed._Trial, "_timed", timed)
    monkeypatch.setattr(speed, "_compiler_problem", lambda place: "")
    return given


def test_the_form_with_the_shortest_whole_run_is_chosen_and_recorded(figures):
    name, record = choose(Model())
    assert name == record.chosen == "step"
    unit = "predicted s for the run"
    assert record.candidates["eager"][unit] == 1000
    assert record.candidates["blocks"][unit] == 9.5 + 500
    assert record.candidates["step"][unit] == pytest.approx(29.6 + 400)
    assert "1000 micro-batches ahead" in record.reason
    assert not record.overridden


def test_what_can_take_a_minute_is_said_before_it_begins(figures, caplog):
    caplog.set_level("INFO")
    choose(Model())
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" before")[0] for text in said] == [
        "compile: tries 'blocks'",
        "compile: tries 'step'",
    ]
    assert all("compile='off' leaves it out" in text for text in said)


def test_a_short_run_does_not_even_try(figures, caplog):
    caplog.set_level("INFO")
    name, record = choose(Model(), steps=50)
    assert name == "eager"
    assert not caplog.records
    assert "not tried: the run takes about 50 s" in record.candidates["blocks"]["failed"]


def test_compiling_that_gains_nothing_steps_aside(figures):
    figures |= {"blocks": (5.0, 0.99), "step": (5.0, 1.2)}
    name, record = choose(Model())
    assert name == "eager"
    assert "nothing beats 'eager' by 2%" in record.reason


def test_a_form_that_does_not_work_loses(figures):
    figures |= {"blocks": None, "step": None}
    name, record = choose(Model())
    assert name == "eager"
    assert record.candidates["blocks"]["failed"] == "no C++ compiler found"


def test_a_resumed_run_replays_and_the_user_overrides(figures):
    _, record = choose(Model())
    made = Decisions(records={"compile": record}).to_json()
    figures |= {"eager": None, "step": None, "blocks": None}
    name, again = choose(Model(), Decisions.from_json(made))
    assert name == "step"
    assert again.replayed
    name, record = choose(Model(), Decisions.from_json(made), asked="off")
    assert name == "eager"
    assert record.overridden
    assert choose(Model(), Decisions.from_json(made), asked="blocks")[0] == "blocks"


def test_what_cannot_be_compiled_here_is_not_replayed_and_not_asked_for(figures, monkeypatch):
    _, record = choose(Model())
    monkeypatch.setattr(speed, "_compiler_problem", lambda place: "no C++ compiler found")
    figures |= {"blocks": None, "step": None}
    made = Decisions(records={"compile": record}).to_json()
    name, again = choose(Model(), Decisions.from_json(made))
    assert name == "eager"
    assert not again.replayed
    with pytest.raises(ConfigError, match=r"compile: got 'step', but torch .*no C\+\+ compiler"):
        choose(Model(), asked="step")
    assert choose(Model(), Decisions.from_json(made), asked="off")[0] == "eager"


def test_the_compiler_is_asked_with_a_program_of_one_line(monkeypatch):
    def broken(function):
        raise RuntimeError("no C++ compiler found\nand more lines")

    monkeypatch.setattr(torch, "compile", broken)
    assert speed._compiler_problem(CPU) == "no C++ compiler found"


def test_a_fact_of_this_machine_is_not_replayed(monkeypatch):
    then = Decisions()
    then.record("host memory pool", "on", reason="freed blocks are kept")
    then.record("attention", "lezero", reason="measured")
    now = Decisions.from_json(then.to_json())
    monkeypatch.setenv("LEZERO_POOL", "0")
    assert speed.host_pool(now) is None
    assert now.records["host memory pool"].chosen == "off"
    trial = speed._Trial(Model(), next_token_loss, batch(), Precision("fp32", CPU), 1000, 0)
    assert speed._choose_attention(trial, trial.precision, now, "auto") == "torch"
    assert now.records["attention"].chosen == "torch"
    assert not now.records["attention"].replayed


def test_blocks_that_the_user_compiled_stay_compiled():
    model = Model()
    for layer in model.layers:
        layer._compiled_call_impl = layer._call_impl  # as `layer.compile()` sets it
    own = [layer._compiled_call_impl for layer in model.layers]
    _, record = choose(model, steps=20)
    assert list(record.candidates) == ["eager", "step"]
    speed.Forms("blocks", "torch", model, next_token_loss).undo()
    assert [layer._compiled_call_impl for layer in model.layers] == own


def test_forms_that_cannot_be_are_refused(figures):
    with pytest.raises(ConfigError, match="compile: got 'fast', allowed is auto, off"):
        speed.check_asked(Model(), "fast", "auto")
    with pytest.raises(ConfigError, match="attention: got 'fast', allowed is auto, torch, lezero"):
        speed.check_asked(Model(), "off", "fast")
    with pytest.raises(ConfigError, match=r"compile: got 'blocks', but the model has no"):
        speed.check_asked(nn.Linear(4, 11), "blocks", "auto")
    for form in ("auto", "off", "eager", "blocks", "step"):
        speed.check_asked(Model(), form, "torch")
    with pytest.raises(ConfigError, match="compile: got 'blocks'"):
        choose(nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11)), asked="blocks")


def test_the_trial_leaves_gradients_buffers_and_generators_as_they_were():
    model = Model(noisy=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    generators = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    name, record = choose(model, steps=20)
    assert name == "eager"
    assert record.candidates["eager"]["predicted s for the run"] > 0
    assert [name for name, _ in model.named_parameters()] == names
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for parameter, (gradient, copy) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, copy)
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])
    assert np.array_equal(np.random.get_state()[1], generators[2])
    assert all(layer._compiled_call_impl is None for layer in model.layers)


@pytest.fixture
def compiler(monkeypatch):
    """What torch's compiler leaves behind by itself: a variable and a progress bar's thread."""
    import tqdm

    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "0")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    yield
    torch._dynamo.reset()


def test_compiled_forms_give_the_numbers_of_the_eager_one_and_keep_names(compiler):
    outcome = {}
    for form in speed.FORMS:
        torch.manual_seed(0)
        model = Model(block=PlainBlock)
        names = list(model.state_dict())
        engine = Engine(
            model, AdamW(model, lr=1e-2), loss=next_token_loss, precision="fp32", compile=form
        )
        losses = [engine.train_step(batch(i)).loss for i in range(3)]
        assert list(model.state_dict()) == names
        compiled = [layer._compiled_call_impl is not None for layer in model.layers]
        assert all(compiled) if form == "blocks" else not any(compiled)
        assert engine.decisions.records["compile"].overridden
        outcome[form] = losses
    assert outcome["blocks"] == pytest.approx(outcome["eager"], rel=1e-5)
    assert outcome["step"] == pytest.approx(outcome["eager"], rel=1e-5)


class Recomputed(nn.Module):
    """One layer of attention, whose activations are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False).square().mean()


@pytest.mark.skipif(not available(), reason="no kernel of attention for this processor")
@pytest.mark.parametrize("form", ["off", "step"])
def test_activations_are_recomputed_with_the_attention_that_made_them(compiler, form):
    torch.manual_seed(0)
    model = Recomputed()
    engine = Engine(model, AdamW(model), precision="bf16", compile=form, attention="lezero")
    result = engine.train_step(torch.randn(8, 64, 64))
    assert result.skipped is None
    assert result.grad_norm > 0


def test_a_loss_that_changes_its_batch_trains_the_first_step_on_it():
    """In the trial, which runs the first batch too, and while the model is asked if it shifts."""

    def loss(model, batch):
        batch["tokens"].remainder_(5).add_(1)
        return next_token_loss(model, {"tokens": batch["tokens"], "targets": batch.pop("labels")})

    def trained(form):
        torch.manual_seed(0)
        model = Model(block=PlainBlock)
        engine = Engine(model, AdamW(model), loss=loss, precision="fp32", compile=form)
        given = batch()
        given["labels"] = given.pop("targets")
        return engine.train_step(given).loss, sorted(given)

    loss_of_first, keys = trained("auto")
    assert (loss_of_first, keys) == trained("off")
    assert keys == ["labels", "tokens"]


class Codebook(nn.Module):
    """Moves frozen parameters towards what it sees, as a teacher or the codes of a VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.mean = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.seen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
            self.seen.data = self.seen.data + 1
        return self.line(x - self.mean).square().mean()


@pytest.mark.parametrize("form", ["auto", "off"])
def test_what_is_frozen_moves_once_a_step_and_not_in_a_skipped_one(form):
    model = Codebook()
    engine = Engine(model, AdamW(model), precision="fp32", compile=form)
    x = torch.ones(4, 2)
    for value, seen, mean in ((1.0, 1, 0.5), (torch.nan, 1, 0.5), (1.0, 2, 0.75)):
        result = engine.train_step(x * value)
        assert (result.skipped is None) is (value == 1.0)
        assert model.seen.item() == seen
        assert model.mean.tolist() == [mean, mean]


def test_repeated_blocks_are_the_longest_list_of_one_class():
    model = Model()
    assert speed.repeated_blocks(model) == list(model.layers)
    assert speed.repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    assert speed.repeated_blocks(nn.Linear(2, 2)) == []
