"""Which form a run takes: found in its own steps, recorded, replayed, overridden."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.optim import AdamW
from lezero.train import tuning
from lezero.train.engine import Engine
from lezero.train.loss import next_token_loss
from lezero.train.precision import Precision
from lezero.train.tuning import Tuner
from tests.train.test_speed import Model, PlainBlock, batch, compiler

__all__ = ["compiler"]

CPU = torch.device("cpu")
FIGURES = {"eager": (1.0, 1.0), "blocks": (10.0, 0.5), "step": (30.0, 0.4)}
"""Made-up seconds of the first step in a form and of each other one."""
UNIT = "predicted s for the run"


@pytest.fixture(autouse=True)
def compiles(monkeypatch):
    monkeypatch.setattr(tuning, "compiler_problem", lambda place: "")


def tuner(model=None, decisions=None, asked="auto", attention="torch"):
    return Tuner(
        model or Model(), next_token_loss, decisions or Decisions(), compile=asked,
        attention=attention, accumulate=1,
    )  # fmt: skip


def take(tuner, figures=FIGURES, steps=1000, most=100, precision="fp32", seen=()):
    """Takes steps of made-up lengths until the form is found; what forms they were in. None for a
    figure: a step in that form fails, as a broken compiler does. seen: forms of earlier steps."""
    forms = []
    tuner.begin(Precision(precision, CPU), steps)
    while tuner.trying and len(forms) < most:
        name = f"{tuner.form.name}/{tuner.form.attention}"
        key = name if name in figures else tuner.form.name
        if figures[key] is None:
            assert tuner.failed(RuntimeError("no C++ compiler found\nand more lines"))
            continue
        tuner.note(figures[key][name in (*seen, *forms)])
        forms.append(name)
    return forms


def chosen(figures=FIGURES, steps=1000, **options):
    made = tuner(**options)
    forms = take(made, figures, steps)
    made.form.off()
    return made.form.name, made.decisions.records["compile"], forms


def test_the_form_with_the_shortest_whole_run_is_chosen_and_recorded():
    name, record, forms = chosen()
    assert name == record.chosen == "step"
    assert record.candidates["eager"][UNIT] == 1000
    assert record.candidates["blocks"][UNIT] == 9.5 + 500
    assert record.candidates["step"][UNIT] == pytest.approx(29.6 + 400)
    assert "1000 steps ahead" in record.reason
    assert not record.overridden
    turns = ["blocks/torch", "eager/torch"] * 4 + ["step/torch", "eager/torch"] * 4
    assert forms == ["eager/torch"] * 4 + turns


def test_a_machine_that_slows_down_harms_no_form():
    made, slow = tuner(), iter(range(1, 1000))
    made.begin(Precision("fp32", CPU), 1000)
    while made.trying:
        made.note(
            {"eager": 1.0, "blocks": 0.9, "step": 0.95}[made.form.name] * (1 + next(slow) / 99)
        )
    figures = {n: f[UNIT] for n, f in made.decisions.records["compile"].candidates.items()}
    assert made.form.name == "blocks"
    assert figures["blocks"] / figures["eager"] == pytest.approx(0.9, abs=0.02)


def test_batches_of_many_lengths_are_compared_as_one_length():
    made, lengths = tuner(), iter(random.Random(0).choices(range(64, 257), k=1000))
    made.begin(Precision("fp32", CPU), 1000)
    while made.trying:
        length = next(lengths)
        each = {"eager": 1.0, "blocks": 0.9, "step": 0.95}[made.form.name]
        made.note(each * length / 100, [{"tokens": torch.zeros(2, length), "more": [[0], "x"]}] * 3)
    figures = {n: f[UNIT] for n, f in made.decisions.records["compile"].candidates.items()}
    assert made.form.name == "blocks"
    assert figures["blocks"] / figures["eager"] == pytest.approx(0.9, abs=0.001)


def test_a_resumed_trial_goes_on_with_the_length_it_began_with():
    def step(made, length):
        each = {"eager": 1.0, "blocks": 0.9, "step": 0.95}[made.form.name]
        made.note(each * length, [torch.zeros(length)])

    def figures(made):
        return made.decisions.records["compile"].candidates

    whole, first, second = tuner(), tuner(), tuner()
    for made in (whole, first):
        made.begin(Precision("fp32", CPU), 1000)
        for length in (100, 50, 80, 90, 200):
            step(made, length)
    second.forget(list(first.taken), first.ahead, first.size)
    second.begin(Precision("fp32", CPU), 995)
    for made in (whole, second):
        while made.trying:
            step(made, 70)
    assert figures(second) == figures(whole)


def test_what_can_take_a_minute_is_said_before_it_begins(caplog):
    caplog.set_level("INFO")
    chosen()
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" in the")[0] for text in said] == [
        "compile: tries 'blocks'",
        "compile: tries 'step'",
    ]
    assert all("compile='off' leaves it out" in text for text in said)


def test_a_short_run_does_not_even_try(caplog):
    caplog.set_level("INFO")
    name, record, forms = chosen(steps=50)
    assert name == "eager"
    assert forms == ["eager/torch"]
    assert not caplog.records
    assert "not tried: the run takes about 50 s" in record.candidates["blocks"]["failed"]


def test_compiling_that_gains_nothing_steps_aside():
    name, record, _ = chosen({**FIGURES, "blocks": (5.0, 0.99), "step": (5.0, 1.2)})
    assert name == "eager"
    assert "nothing beats 'eager' by 2%" in record.reason


def test_a_form_that_does_not_work_loses(monkeypatch):
    name, record, _ = chosen({**FIGURES, "step": None})
    assert name == "blocks"
    assert record.candidates["step"] == {UNIT: None, "failed": "no C++ compiler found"}
    monkeypatch.setattr(tuning, "compiler_problem", lambda place: "no C++ compiler found")
    name, record, forms = chosen()
    assert name == "eager"
    assert set(forms) == {"eager/torch"}
    assert record.candidates["blocks"]["failed"] == "no C++ compiler found"


def test_the_form_that_there_was_is_not_blamed():
    made = tuner()
    made.begin(Precision("fp32", CPU), 1000)
    assert not made.failed(RuntimeError("the model is wrong"))
    while made.form.name == "eager":
        made.note(1.0)
    assert not made.failed(ConfigError("the batch is wrong"))
    made.note(1.0)
    assert made.form.name == "eager"
    assert not made.failed(RuntimeError("the model is wrong"))


def test_a_resumed_run_replays_and_the_user_overrides():
    _, record, _ = chosen()
    made = Decisions(records={"compile": record}).to_json()
    name, again, forms = chosen({}, decisions=Decisions.from_json(made))
    assert (name, forms) == ("step", [])
    assert again.replayed
    assert again.candidates == record.candidates
    name, forced, forms = chosen({}, decisions=Decisions.from_json(made), asked="off")
    assert (name, forms) == ("eager", [])
    assert forced.overridden
    assert chosen({}, asked="blocks")[0] == "blocks"


@pytest.mark.parametrize("after", range(20))
def test_a_run_that_is_interrupted_goes_on_where_its_trial_was(after):
    figures = {**FIGURES, "blocks": None} if after % 2 else FIGURES
    whole, first = tuner(), tuner()
    forms = take(whole, figures)
    before = take(first, figures, most=after)
    first.form.off()
    second = tuner()
    second.forget(list(first.taken), first.ahead, first.size)
    second.decisions.replay = Decisions.from_json(first.decisions.to_json()).replay
    left = 10  # of which no trial would begin
    assert before + take(second, figures, left, seen=before) == forms
    assert second.form.name == whole.form.name
    assert whole.taken == second.taken == []


def test_what_cannot_be_compiled_here_is_not_replayed_and_not_asked_for(monkeypatch):
    _, record, _ = chosen()
    monkeypatch.setattr(
        "lezero.train.speed.compiler_problem", lambda place: "no C++ compiler found"
    )
    monkeypatch.setattr(tuning, "compiler_problem", lambda place: "no C++ compiler found")
    made = Decisions(records={"compile": record}).to_json()
    name, again, _ = chosen(decisions=Decisions.from_json(made))
    assert name == "eager"
    assert not again.replayed
    with pytest.raises(ConfigError, match=r"compile: got 'step', but torch .*no C\+\+ compiler"):
        chosen(asked="step")
    assert chosen({}, decisions=Decisions.from_json(made), asked="off")[0] == "eager"


def test_attention_is_tried_in_turns_and_remembered(monkeypatch):
    monkeypatch.setattr(tuning, "kernel_name", lambda: "a kernel")
    monkeypatch.setattr(tuning, "available", lambda: True)
    figures = {"eager/torch": (3.0, 1.0), "eager/lezero": (2.0, 0.9), "blocks": (9.0, 2.0)}
    made = tuner(attention="auto")
    forms = take(made, {**figures, "step": (9.0, 2.0)}, precision="bf16")
    assert forms[:9] == ["eager/torch"] + ["eager/lezero", "eager/torch"] * 4
    record = made.decisions.records["attention"]
    assert record.chosen == made.form.attention == "lezero"
    assert {n: f["s a step"] for n, f in record.candidates.items()} == {"torch": 1.0, "lezero": 0.9}
    assert made.form.name == "eager"

    then = Decisions.from_json(made.decisions.to_json())
    again = tuner(decisions=then, attention="auto")
    assert take(again, {}, precision="bf16") == []
    assert again.form.attention == "lezero"
    # What computes in fp32 has no use for it.
    for steps, precision, why in ((1000, "fp32", "computes in bf16"), (10, "bf16", "too few")):
        other = tuner(attention="auto")
        take(other, {"eager": (1.0, 1.0)}, steps, most=1, precision=precision)
        assert other.decisions.records["attention"].chosen == "torch"
        assert why in other.decisions.records["attention"].reason
    # But a run that was switched to fp32 may switch back, and then has the kernel that it had.
    for kernel, chosen in (("a kernel", "lezero"), ("", "torch")):
        monkeypatch.setattr(tuning, "kernel_name", lambda kernel=kernel: kernel)
        then = Decisions.from_json(made.decisions.to_json())
        again = tuner(decisions=then, attention="auto")
        assert take(again, {}) == []
        assert then.records["attention"].chosen == again.form.attention == chosen


# what a trial would have left behind ---------------------------------------------------------


class Stateful(nn.Module):
    """Keeps what forward has seen in all the places where a model can."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.teacher = nn.Linear(2, 2), nn.Linear(2, 2)
        self.mean = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.seen, self.hidden = 0, torch.zeros(2)

    def forward(self, x):
        self.seen += 1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
            self.teacher.weight.lerp_(self.line.weight, 0.1)
        y = torch.tanh(self.line(x) + self.hidden + self.mean)
        self.hidden = y.mean(0).detach()
        return (y - self.teacher(x)).square().mean() * (1 + 0.1 * self.seen)


@pytest.mark.parametrize("form", ["auto", "off"])
def test_steps_equal_a_plain_loop_whatever_the_model_keeps(form, monkeypatch):
    """And a batch that the loss changes, another network that it calls, an optimizer in a hook."""
    monkeypatch.setattr(tuning, "_TYPICAL_COMPILE_S", 0.0)  # so that all of the trial is run
    monkeypatch.setattr(tuning.Tuner, "_no_compiler", lambda self: "none, for a test")

    def made():
        torch.manual_seed(0)
        model, other = Stateful(), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        own = torch.optim.SGD([other[1].weight], lr=0.1)

        def step(weight):
            own.step()
            weight.grad = None

        other[1].weight.register_post_accumulate_grad_hook(step)
        return model, other, torch.optim.SGD(model.line.parameters(), lr=0.1)

    def loss(model, batch, other):
        x = batch.pop("x").sub_(1.0)
        return model(other(x))

    data = [torch.randn(4, 2, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    model, other, optimizer = made()
    wanted = []
    for x in data:
        optimizer.zero_grad()
        found = loss(model, {"x": x.clone()}, other)
        found.backward()
        optimizer.step()
        wanted.append(found.item())

    ours, another, optimizer = made()
    engine = Engine(
        ours, optimizer, loss=lambda m, b: loss(m, b, another), precision="fp32", compile=form,
        counted=lambda batch: 4,
    )  # fmt: skip
    assert [engine.train_step({"x": x.clone()}).loss for x in data] == pytest.approx(wanted, 1e-6)
    assert ours.seen == model.seen == 8
    for mine, plain in ((ours, model), (another, other)):
        for (name, value), same in zip(
            mine.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(value, same, msg=name)


def test_a_form_that_fails_in_a_step_is_left_and_the_step_taken(compiler, monkeypatch):
    monkeypatch.setattr(tuning, "_TYPICAL_COMPILE_S", 0.0)

    class Picky(Model):
        def forward(self, tokens):
            if torch.compiler.is_compiling() or any(x._compiled_call_impl for x in self.layers):
                raise RuntimeError("not compiled, please")
            return super().forward(tokens)

    losses = []
    for form in ("off", "auto"):
        torch.manual_seed(0)
        model = Picky(block=PlainBlock)
        engine = Engine(
            model, AdamW(model), loss=next_token_loss, precision="fp32", compile=form,
            attention="torch",
        )  # fmt: skip
        losses.append([engine.train_step(batch(i)).loss for i in range(14)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # a compiled loss rounds as it likes
    record = engine.decisions.records["compile"]
    # What fails while a whole step is compiled torch runs as it is written, as fast as plainly.
    assert record.chosen != "blocks"
    assert "not compiled, please" in record.candidates["blocks"]["failed"]
    assert all(layer._compiled_call_impl is None for layer in model.layers)


def test_a_form_that_fails_midway_leaves_no_gradient_behind(monkeypatch):
    """The first micro-batch of two had made one already."""
    x = torch.arange(8.0).view(4, 2)
    weights = []
    for fails in (False, True):
        torch.manual_seed(0)
        model, calls = nn.Linear(2, 1), []

        def loss(model, micro, calls=calls, fails=fails):
            calls.append(micro)
            if fails and len(calls) == 2:
                raise RuntimeError("the compiler broke")
            return model(micro).square().mean()

        engine = Engine(
            model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, accumulate=2,
            precision="fp32", compile="off",
        )  # fmt: skip
        monkeypatch.setattr(engine.tuner, "failed", lambda error: True)
        engine.train_step(x)
        assert len(calls) == (4 if fails else 2)
        weights.append(model.weight.tolist())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("form", ["auto", "off"])
def test_what_is_frozen_moves_once_a_step_and_not_in_a_skipped_one(form):
    model = Stateful()
    engine = Engine(model, torch.optim.SGD(model.line.parameters(), lr=0.1), compile=form)
    x = torch.ones(4, 2)
    for value, mean in ((1.0, 0.5), (torch.nan, 0.5), (1.0, 0.75)):
        result = engine.train_step(x * value)
        assert (result.skipped is None) is (value == 1.0)
        model.hidden.nan_to_num_()
        assert model.mean.tolist() == [mean, mean]


def test_a_checkpoint_knows_what_was_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_TYPICAL_COMPILE_S", 0.0)

    def engine():
        model = Model(block=PlainBlock)
        return Engine(
            model, AdamW(model), loss=next_token_loss, precision="fp32", attention="torch",
            total_steps=20,
        )  # fmt: skip

    first, second = engine(), engine()
    for i in range(3):
        first.train_step(batch(i))
    second.load(first.save(tmp_path))
    assert second.tuner.ahead == first.tuner.ahead == 20
    second.train_step(batch(3))
    assert len(first.tuner.taken) == 3
    assert second.tuner.taken[:3] == first.tuner.taken
    assert second.tuner.trying
    first.train_step(batch(3))
    assert second.tuner.form.name == first.tuner.form.name == "blocks"
    first.load(tmp_path)  # the form is found anew, and nothing of the old one stays
    assert not first.tuner.begun
    assert all(layer._compiled_call_impl is None for layer in first.model.layers)
