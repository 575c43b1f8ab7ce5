"""The engine against plain PyTorch: sums, counts, clipping, precision, skipped steps."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lezero.core.errors import ConfigError, NumericsError, OrderError
from lezero.optim import AdamW, Schedule
from lezero.train.engine import Engine
from lezero.train.loss import next_token_loss

VOCAB = 17


class Tiny(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.head(x)


def make(dtype=torch.float64, dropout=0.0, **options):
    torch.manual_seed(0)
    model = Tiny(dropout).to(dtype)
    optimizer = AdamW(model, lr=1e-2)
    options = {"precision": "fp32", "compile": "off", "loss": next_token_loss, **options}
    return Engine(model, optimizer, **options)


def batches(count, size=8, length=6, mask=True):
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        tokens = torch.randint(0, VOCAB, (size, length), generator=generator)
        targets = torch.randint(0, VOCAB, (size, length), generator=generator)
        if mask:
            for row in range(size):
                targets[row, : row % length] = -100
        made.append({"tokens": tokens, "targets": targets})
    return made


def flat(engine):
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()])


def test_a_step_equals_a_plain_loop():
    engine = make(clip=0.5)
    torch.manual_seed(0)
    model = Tiny().double()
    optimizer = AdamW(model, lr=1e-2)
    for batch in batches(5):
        result = engine.train_step(batch)
        logits = model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss == pytest.approx(loss.item(), abs=1e-12)
        assert result.grad_norm == pytest.approx(norm.item(), abs=1e-12)
    mine = dict(engine.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter - mine[name]).abs().max() < 1e-12, name


@pytest.mark.parametrize("accumulate", [2, 3, 8])
def test_accumulation_over_unequal_token_counts_equals_one_big_batch(accumulate):
    whole, parts = make(), make(accumulate=accumulate)
    for batch in batches(4):
        a, b = whole.train_step(batch), parts.train_step(batch)
        assert a.tokens == b.tokens
        assert abs(a.loss - b.loss) < 1e-10
    assert (flat(whole) - flat(parts)).abs().max() < 1e-10


def test_the_mean_of_micro_batch_means_would_be_wrong_here():
    """The mistake that the test above guards against really shows on this data."""
    batch = batches(1)[0]
    torch.manual_seed(0)
    model = Tiny().double()
    means = [
        next_token_loss(model, {k: v[i : i + 4] for k, v in batch.items()}).item() for i in (0, 4)
    ]
    assert abs(sum(means) / 2 - next_token_loss(model, batch).item()) > 1e-6


def test_a_fully_masked_micro_batch_contributes_nothing():
    batch = batches(1, size=4)[0]
    batch["targets"][:2] = -100
    engine, small = make(accumulate=2), make()
    a = engine.train_step(batch)
    b = small.train_step({k: v[2:] for k, v in batch.items()})
    assert a.loss == pytest.approx(b.loss, abs=1e-12)
    assert torch.equal(flat(engine), flat(small))
    batch["targets"][:] = -100
    with pytest.raises(ConfigError, match="nothing in this batch counts"):
        engine.train_step(batch)


def test_dropout_depends_on_seed_step_and_micro_batch_only():
    a, b = make(dropout=0.5, accumulate=2), make(dropout=0.5, accumulate=2)
    before = torch.get_rng_state()
    for batch in batches(2):
        torch.manual_seed(torch.randint(0, 99, ()).item())
        a.train_step(batch)
        b.train_step(batch)
    assert torch.equal(flat(a), flat(b))
    torch.set_rng_state(before)
    a.train_step(batches(1)[0])
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator was moved"


def test_a_model_that_returns_its_loss_counted_in_samples():
    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x, y):
            return SimpleNamespace(loss=F.mse_loss(self.line(x), y))

    def engine(accumulate):
        torch.manual_seed(0)
        model = Regressor().double()
        return Engine(
            model, torch.optim.SGD(model.parameters(), 0.1), accumulate=accumulate, compile="off",
            precision="fp32",
        )  # fmt: skip

    x = torch.randn(7, 3, dtype=torch.float64)
    batch = {"x": x, "y": x.sum(1, keepdim=True)}
    whole, parts = engine(1), engine(3)
    for _ in range(3):
        a, b = whole.train_step(batch), parts.train_step(batch)
        assert a.tokens == b.tokens == 7
        assert abs(a.loss - b.loss) < 1e-12
    assert (flat(whole) - flat(parts)).abs().max() < 1e-10


def test_evaluate_weights_by_count_and_leaves_the_mode():
    engine = make()
    data = batches(3)
    engine.train_step(data[0])
    ragged = [data[1], {k: v[:3] for k, v in data[2].items()}]
    got = engine.evaluate(ragged)
    joined = {k: torch.cat([b[k] for b in ragged]) for k in data[0]}
    assert got == pytest.approx(next_token_loss(engine.model, joined).item(), abs=1e-12)
    assert engine.model.training


def test_a_stop_ends_an_evaluation_between_batches():
    engine = make()
    seen = []

    def data():
        for batch in batches(5):
            seen.append(batch)
            yield batch
            if len(seen) == 2:
                engine.request_stop()

    assert engine.evaluate(data()) is None
    assert len(seen) == 3
    assert engine.train_step(batches(1)[0]).stop
    assert engine.evaluate(batches(1)) is not None


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_precision_changes_in_mid_run_and_state_stays(name):
    engine = make(torch.float32)
    data = batches(6)
    engine.train_step(data[0])
    state = engine.optimizer.state[engine.model.head.weight]["exp_avg"]
    before = state.clone()
    engine.set_precision(name)
    assert engine.optimizer.state[engine.model.head.weight]["exp_avg"] is state
    assert torch.equal(state, before)
    losses = [engine.train_step(batch).loss for batch in data[1:]]
    assert all(p.dtype == torch.float32 for p in engine.model.parameters())
    assert engine.precision.name == name
    assert all(torch.isfinite(torch.tensor(losses)))
    engine.set_precision("fp32")
    assert engine.train_step(data[0]).skipped is None


def test_fp16_overflow_lowers_the_scale_and_recovers():
    engine = make(torch.float32, precision="fp16")
    engine.precision.scaler._scale = None
    engine.precision.scaler._init_scale = 2.0**40
    results = [engine.train_step(batch) for batch in batches(30)]
    assert "fp16 overflow" in (results[0].skipped or "")
    assert results[-1].skipped is None
    assert engine.precision.scale < 2.0**40


def test_learning_rate_follows_the_schedule():
    schedule = Schedule(kind="linear", warmup=2, final=0.0)
    engine = make(schedule=schedule, total_steps=6)
    lrs = [engine.train_step(batch).lr for batch in batches(6)]
    assert lrs == pytest.approx([0.005, 0.01, 0.0075, 0.005, 0.0025, 0.0])


class Poisoned(nn.Module):
    """Gives infinity forward, or NaN backward only, when told to."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.mode = ""

    def forward(self, x):
        y = self.line(x)
        if self.mode == "forward":
            return y / 0.0
        if self.mode == "backward":
            return y + (y - y).abs().sqrt()  # value 0, gradient 0 · inf
        return y


def poisoned(max_skipped=3):
    engine = make(max_skipped=max_skipped)
    torch.manual_seed(0)
    model = Tiny().double()
    model.layers[1] = Poisoned().double()
    return Engine(
        model, AdamW(model, lr=1e-2), loss=next_token_loss, precision="fp32", compile="off",
        max_skipped=max_skipped, decisions=engine.decisions,
    )  # fmt: skip


@pytest.mark.parametrize(("mode", "where"), [("forward", "output"), ("backward", "gradient")])
def test_non_finite_steps_are_skipped_and_named(mode, where):
    engine = poisoned()
    data = batches(6)
    engine.train_step(data[0])
    before = flat(engine)
    engine.model.layers[1].mode = mode
    result = engine.train_step(data[1])
    assert result.skipped
    assert "layers.1" in result.skipped
    assert where in result.skipped
    assert torch.equal(flat(engine), before)
    engine.model.layers[1].mode = ""
    assert engine.train_step(data[2]).skipped is None
    engine.model.layers[1].mode = mode
    for batch in data[3:5]:
        assert engine.train_step(batch).skipped
    with pytest.raises(NumericsError, match=r"layers\.1.*non-finite step 3 in a row"):
        engine.train_step(data[5])


class Centre(nn.Module):
    """Keeps a mean in a buffer that it replaces, as many models keep averages."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x * self.table


@pytest.mark.parametrize("bad", [0, 2])
def test_a_skipped_step_leaves_buffers_as_they_were(bad):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Centre(), nn.Linear(4, 1))
    engine = Engine(
        model, AdamW(model, lr=1e-2), loss=lambda model, x: model(x).square().mean(),
        compile="off",
    )  # fmt: skip
    for step in range(4):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        x = torch.randn(8, 3)
        if step == bad:
            x[0, 0] = torch.nan
        assert bool(engine.train_step(x).skipped) is (step == bad)
        same = {n for n, value in model.state_dict().items() if torch.equal(value, before[n])}
        assert same == (before.keys() if step == bad else {"2.table"})
    assert engine.evaluate([torch.randn(8, 3)]) > 0


def test_a_non_finite_parameter_is_named():
    engine = make()
    engine.model.layers[0][0].bias.data[2] = float("nan")
    result = engine.train_step(batches(1)[0])
    assert "weights of module 'layers.0.0', parameter 'bias'" in result.skipped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate: got 0"),
        ({"clip": -1.0}, "clip: got -1"),
        ({"precision": "fp12"}, "precision: got 'fp12', allowed is auto, fp32, bf16, fp16"),
        ({"schedule": Schedule()}, "needs total_steps"),
        ({"counted": "words"}, "counted: got 'words'"),
        ({"compile": "fast"}, "compile: got 'fast'"),
        ({"attention": "fast"}, "attention: got 'fast'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_bad_batches():
    with pytest.raises(ConfigError, match="it has no samples"):
        make(accumulate=9).train_step(batches(1, size=0)[0])
    with pytest.raises(ConfigError, match="accumulate=1"):
        make().train_step([batches(1)[0]] * 2)


def test_an_optimizer_of_other_parameters_is_refused():
    model, other = Tiny(), Tiny()
    with pytest.raises(OrderError, match="build the optimizer after"):
        Engine(model, AdamW(other))


def test_without_a_loss_the_error_says_what_to_return():
    model = Tiny()
    engine = Engine(model, AdamW(model), compile="off", precision="fp32")
    with pytest.raises(ConfigError, match="no scalar loss"):
        engine.train_step({"tokens": torch.zeros(2, 3, dtype=torch.long)})


def test_stop_is_seen_in_the_result():
    engine = make()
    data = batches(3)
    assert not engine.train_step(data[0]).stop
    engine.request_stop()
    assert engine.train_step(data[1]).stop
    assert not engine.train_step(data[2]).stop, "a request is answered once"


def test_gradients_left_by_others_do_not_count():
    engine, twin = make(clip=0.1), make(clip=0.1)
    batch = batches(1)[0]
    next_token_loss(engine.model, batch).backward()
    assert engine.train_step(batch).grad_norm == twin.train_step(batch).grad_norm
    assert torch.equal(flat(engine), flat(twin))


def test_finite_gradients_whose_squares_overflow_make_a_step():
    model = nn.Linear(4, 1)
    x = torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-22)
    engine = Engine(model, optimizer, loss=lambda m, b: m(b).mean() * 1e22, precision="fp32")
    result = engine.train_step(x)
    assert result.skipped is None
    assert result.grad_norm == pytest.approx(5**0.5 * 1e22)


def test_parameters_that_the_optimizer_does_not_hold_keep_no_gradient():
    torch.manual_seed(0)
    model = Tiny().double()
    optimizer = torch.optim.SGD(model.head.parameters(), 1e-12)
    engine = Engine(model, optimizer, loss=next_token_loss, precision="fp32", compile="off")
    norms = [engine.train_step(batches(1)[0]).grad_norm for _ in range(3)]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_nothing_to_train_and_no_batch():
    model = Tiny()
    optimizer = AdamW(model)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        Engine(model, optimizer)
    with pytest.raises(ConfigError, match="no tensor with a batch dim"):
        make().train_step(None)


def test_what_the_user_put_into_evaluation_mode_stays_in_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).eval()
    engine = Engine(
        model, AdamW(model, lr=1e-2), loss=lambda model, x: model(x).mean(), precision="fp32"
    )
    engine.train_step(torch.ones(3, 2))
    assert all(module.training for module in model.modules())
    model[1].eval()
    for use in (engine.train_step, lambda batch: engine.evaluate([batch])):
        mean = model[1].running_mean.clone()
        use(torch.randn(3, 2))
        assert [module.training for module in model] == [True, False, True]
        assert torch.equal(model[1].running_mean, mean)
