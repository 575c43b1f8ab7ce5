"""What a batch counts, and that it is what the model's loss is the mean over."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lezero.core import groups
from lezero.core.errors import ConfigError
from lezero.optim import AdamW
from lezero.parallel.zero import Zero, shard_
from lezero.train.counting import Counter
from lezero.train.engine import Engine

VOCAB = 30
SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "vocab_size": VOCAB, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BART = {
    "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24,
    "vocab_size": VOCAB, "dropout": 0.0,
}  # fmt: skip


def t5(hf):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(
        **sizes, vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def gpt2(hf):
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": VOCAB, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


MODELS = {
    "t5": t5,
    "masked": lambda hf: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
    "tagger": lambda hf: hf.BertForTokenClassification(hf.BertConfig(**SMALL, num_labels=VOCAB)),
    "bart decoder": lambda hf: hf.BartForCausalLM(hf.BartConfig(**BART)),
    "gpt2": gpt2,
    "llama": lambda hf: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1)),
}
SHIFTING = ("gpt2", "llama")


def steps(name, accumulate, monkeypatch):
    """(gradients, loss, counted) of one step, and whether the engine found that labels shift."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = MODELS[name](hf).double()
    narrow = torch.Tensor.float
    monkeypatch.setattr(  # the loss stays in fp64
        torch.Tensor, "float", lambda x: x if x.is_floating_point() else narrow(x)
    )
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    engine = Engine(model, optimizer, accumulate=accumulate, compile="off", precision="fp32")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCAB, (4, 7), generator=generator)
    labels = torch.randint(2, VOCAB, (4, 7), generator=generator)
    for row, masked in enumerate(((), (0, 1, 2), (1, 2, 3, 4, 5), (3,))):
        labels[row, list(masked)] = -100
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    result = engine.train_step({"input_ids": tokens, "labels": labels})
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return before - after, result.loss, result.tokens, engine.count.shifted


@pytest.mark.parametrize("name", MODELS)
def test_accumulation_equals_one_big_batch_whether_or_not_the_model_shifts_labels(
    name, monkeypatch
):
    whole, loss, counted, shifted = steps(name, 1, monkeypatch)
    assert shifted is (name in SHIFTING)
    assert counted == (28 - 9 - 3 if shifted else 28 - 9)
    for accumulate in (2, 4):
        parts, same, again, _ = steps(name, accumulate, monkeypatch)
        assert again == counted
        assert same == pytest.approx(loss, abs=1e-10)
        assert (whole - parts).norm() / whole.norm() < 1e-10


class Own(nn.Module):
    """A model of nobody's library; `forward` gives its loss."""

    def __init__(self, shift, zero_if_empty=False, extra=0.0):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.shift, self.zero_if_empty, self.extra = shift, zero_if_empty, extra
        self.drop = nn.Dropout(0.5)

    def forward(self, x, labels):
        logits = self.head(self.drop(self.embed(x)))
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits, labels = logits.flatten(0, 1), labels.flatten()
        total = F.cross_entropy(logits, labels, reduction="sum")
        count = (labels != -100).sum().clamp(min=int(self.zero_if_empty))
        return SimpleNamespace(loss=total / count + self.extra)


def own_engine(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Engine(model, optimizer, compile="off", precision="fp32", **options)


@pytest.mark.parametrize("extra", [0.0, 0.5])
@pytest.mark.parametrize("zero_if_empty", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_any_model_is_asked_whether_it_shifts(shift, zero_if_empty, extra):
    labels = torch.tensor([[1, 2, 3, -100], [-100, -100, 5, 6]])
    batch = {"x": torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]]), "labels": labels}
    engine = own_engine(Own(shift, zero_if_empty, extra))
    generator = torch.get_rng_state()
    engine.evaluate([batch])  # before any step, too
    assert torch.equal(torch.get_rng_state(), generator)
    assert engine.count.shifted is shift
    assert engine.train_step(batch).tokens == (4 if shift else 5)


def test_a_model_that_always_draws_numbers_is_asked_twice_with_the_same():
    class Noisy(Own):
        def forward(self, x, labels):
            self.extra = 0.1 * torch.randn(()) ** 2  # as the latent of a VAE adds
            return super().forward(x, labels)

    ids = torch.arange(8).view(2, 4)
    for shift, tokens in ((True, 6), (False, 8)):
        engine = own_engine(Noisy(shift, zero_if_empty=True))
        generator = torch.get_rng_state()
        assert engine.train_step({"x": ids, "labels": ids}).tokens == tokens
        assert torch.equal(torch.get_rng_state(), generator)


def test_the_question_leaves_the_batch_as_it_is():
    seen = []

    class Writing(Own):
        def forward(self, x, labels):
            seen.append((self.training, x.clone()))
            x[:, 0] = 0  # as a model that writes its own start token does
            return super().forward(x, labels)

    ids = torch.arange(8).view(2, 4) + 1
    own_engine(Writing(shift=True)).train_step({"x": ids.clone(), "labels": ids})
    assert [training for training, _ in seen] == [False, False, True]
    assert torch.equal(seen[-1][1], ids)


def test_a_model_that_cannot_be_asked_is_an_error_and_a_broken_one_speaks_for_itself():
    class Embeds(Own):
        def forward(self, x, labels):
            return SimpleNamespace(loss=self.embed(labels).mean() + self.head.weight.mean())

    batch = {"x": torch.zeros(2, 3).long(), "labels": torch.ones(2, 3).long()}
    with pytest.raises(ConfigError, match=r"whether the model shifts 'labels'.*counted='samples'"):
        own_engine(Embeds(False)).train_step(batch)
    assert own_engine(Embeds(False), counted="samples").train_step(batch).tokens == 2
    with pytest.raises(TypeError, match="unexpected keyword"):
        own_engine(Own(False)).train_step({**batch, "unknown": batch["x"]})


def test_a_gpu_that_died_of_the_question_is_not_asked_again():
    """Every later call fails there, that of the batch itself too."""
    called = []

    class Embeds(Own):
        def forward(self, x, labels):
            called.append(1)
            raise RuntimeError("CUDA error: device-side assert triggered")

    batch = {"x": torch.zeros(2, 3).long(), "labels": torch.ones(2, 3).long()}
    with pytest.raises(ConfigError, match=r"whether the model shifts.*assert.*counted='samples'"):
        own_engine(Embeds(False)).train_step(batch)
    assert len(called) == 1


def test_labels_without_a_token_dim_and_targets_need_no_question():
    count = Counter("auto")
    targets = torch.tensor([[1, -100], [2, 3]])
    assert not count.must_ask({"targets": targets, "labels": targets})
    assert count({"targets": targets}) == 3
    assert not count.must_ask({"labels": targets[1]})
    assert count({"labels": targets[1]}) == 2
    assert not count.must_ask({"labels": targets.double()})
    assert count((targets, targets)) == 2
    assert not Counter("samples").must_ask({"labels": targets})
    assert Counter(lambda batch: 7)({"labels": targets}) == 7
    with pytest.raises(ConfigError, match="counted: got 'words', allowed is auto, tokens, samples"):
        Counter("words")
    with pytest.raises(ConfigError, match="neither 'targets' nor 'labels'"):
        Counter("tokens")({"x": targets})


@pytest.mark.parametrize("name", ["targets", "labels"])
@pytest.mark.parametrize("values", [[1, 2, -100], None, [{"box": (1, 2)}] * 3, "abc"])
def test_only_tensors_and_arrays_are_counted_in_tokens(name, values):
    batch = {"x": torch.ones(3, 2), name: values}
    assert Counter("auto")(batch) == 3
    kind = type(values).__name__
    with pytest.raises(ConfigError, match=f"its '{name}' are a {kind}, allowed is a tensor or an"):
        Counter("tokens")(batch)
    assert Counter("auto")({**batch, name: np.array([1, -100, 2, 3])}) == 3
    labels = torch.ones(3, 2).long()
    assert Counter("auto").must_ask({"x": labels, "targets": None, "labels": labels})


def test_lists_of_labels_are_cut_with_the_tensors_beside_them():
    seen = []

    def loss(model, batch):
        seen.append(batch["labels"])
        return F.cross_entropy(model(batch["x"]), torch.tensor(batch["labels"]))

    engine = own_engine(nn.Linear(2, 3), loss=loss, accumulate=2)
    assert engine.train_step({"x": torch.ones(4, 2), "labels": [0, 1, 2, 0]}).tokens == 4
    assert seen == [[0, 1], [2, 0]]


@pytest.mark.parametrize("name", ["targets", "labels"])
def test_tensors_in_a_list_of_labels_have_rows_of_their_own(name):
    """As the boxes of each image have."""
    boxes = [{"boxes": torch.zeros(rows, 4)} for rows in (1, 5, 0)]
    count = Counter("auto")
    assert count({"x": torch.ones(3, 2), name: boxes}) == 3
    assert count({"x": torch.ones(3, 2), name: [each["boxes"] for each in boxes]}) == 3
    for batch in ({"x": torch.ones(4, 2), name: boxes}, {"x": torch.ones(3, 2), "y": boxes}):
        with pytest.raises(ConfigError, match=r"\[0\]\['boxes'\] has 1.*give counted=function"):
            count(batch)
    engine = own_engine(nn.Linear(2, 1), loss=lambda m, batch: m(batch["x"]).mean())
    assert engine.train_step({"x": torch.ones(3, 2), name: boxes}).tokens == 3


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int8])
@pytest.mark.parametrize("shift", [False, True])
def test_labels_in_an_array_are_asked_for_as_tensors_are(shift, dtype):
    seen = []

    class Arrays(Own):
        def forward(self, x, labels):
            seen.append((type(labels), labels.dtype))
            return super().forward(x, torch.from_numpy(labels).long())

    labels = np.array([[1, 2, 3, -100], [-100, -100, 5, 6]], dtype)
    batch = {"x": torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]]), "labels": labels}
    engine = own_engine(Arrays(shift))
    assert engine.train_step(batch).tokens == (4 if shift else 5)
    assert engine.count.shifted is shift
    assert set(seen) == {(np.ndarray, np.dtype(dtype))}
    assert not Counter("auto").must_ask({"labels": labels.astype(np.float32)})


def test_an_object_that_is_not_looked_into_is_named():
    batch = SimpleNamespace(x=torch.ones(4, 2))
    with pytest.raises(ConfigError, match=r"a SimpleNamespace, has no.*dataclasses.*give a dict"):
        Counter("samples")(batch)


def test_tensors_that_disagree_about_the_samples_are_an_error_that_names_them():
    count = Counter("samples")
    batch = {"class_weights": torch.ones(4), "x": torch.ones(32, 16), "y": torch.ones(32)}
    with pytest.raises(ConfigError, match=r"'class_weights' has 4, 'x' has 32"):
        count(batch)
    with pytest.raises(ConfigError, match=r"'a'\[0\] has 2, 'a'\[1\]\['b'\] has 3"):
        count({"a": (torch.ones(2), {"b": torch.ones(3)})})
    assert count({"scale": torch.tensor(2.0), "name": "text", "x": torch.ones(5, 1)}) == 5
    assert count(torch.ones(6)) == 6


def losses_of(stage):
    """Three steps on this rank's rows of four, whose labels are masked unevenly."""
    torch.manual_seed(0)
    model = Own(shift=True).double()
    model.drop.p = 0.0
    if stage is not None:
        shard_(model, Zero(stage=stage))
    optimizer = AdamW(model, lr=0.1)
    engine = Engine(model, optimizer, compile="off", precision="fp32", accumulate=2)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 9, (3, 2, 4, 5), generator=generator)
    rows[:, 1, 0, 1:] = rows[:, 1, 3, 2] = -100
    share = 4 // groups.world_size()
    own = slice(groups.rank() * share, (groups.rank() + 1) * share)
    found = [engine.train_step({"x": x[own], "labels": y[own]}) for x, y in rows]
    return [(r.loss, r.tokens) for r in found], engine.count.shifted


@pytest.mark.parametrize(
    "returned", [0.5, -8, None, float("nan"), float("inf"), "8", torch.ones(2)]
)
def test_a_function_counts_in_whole_numbers(returned):
    with pytest.raises(ConfigError, match=r"^counted: the function returned .*whole number from 0"):
        Counter(lambda batch: returned)({})


def test_what_a_function_counted_becomes_an_int():
    for returned in (8, 8.0, torch.tensor(8), np.int64(8)):
        count = Counter(lambda batch, given=returned: given)({})
        assert (type(count), count) == (int, 8)


def test_a_batch_is_counted_where_it_lay(monkeypatch):
    """On the host: what is counted on an accelerator makes each step wait for it."""
    places = []

    def count(batch):
        places.append(batch["inputs"].device.type)
        return len(batch["inputs"])

    def moved(batch, place):
        return {
            key: SimpleNamespace(device=torch.device("cuda"), data=x) for key, x in batch.items()
        }

    monkeypatch.setattr("lezero.train.engine.to_device", moved)
    model = nn.Linear(3, 1)
    engine = own_engine(
        model, loss=lambda model, batch: model(batch["inputs"].data).mean(), counted=count
    )
    engine.train_step({"inputs": torch.randn(4, 3)})
    engine.evaluate([{"inputs": torch.randn(4, 3)}])
    assert places == ["cpu", "cpu"]


def test_ranks_ask_together_at_every_stage(ranks):
    alone, shifted = losses_of(None)
    assert shifted
    assert [tokens for _, tokens in alone] == [4 * 4 - 4 - 1] * 3
    for stage in (0, 3):
        for found, shifts in ranks(2, losses_of, stage):
            assert shifts
            assert [tokens for _, tokens in found] == [tokens for _, tokens in alone]
            assert [loss for loss, _ in found] == pytest.approx([x for x, _ in alone], abs=1e-10)


@pytest.mark.parametrize("name", ["targets", "labels"])
def test_a_number_to_predict_may_be_minus_100(name):
    """Only whole numbers are indices that can be ignored."""
    x, y = torch.arange(8.0).reshape(8, 1), torch.arange(8.0).reshape(8, 1)
    y[:3] = -100.0
    made = []
    for accumulate in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        engine = Engine(
            model, torch.optim.SGD(model.parameters(), lr=0.001), accumulate=accumulate,
            loss=lambda m, batch: F.mse_loss(m(batch["x"]), batch[name]),
            precision="fp32", compile="off",
        )  # fmt: skip
        result = engine.train_step({"x": x, name: y})
        assert result.tokens == 8
        made.append([result.loss, result.grad_norm, model.weight.item()])
    assert made[1] == pytest.approx(made[0], rel=1e-6)
    assert Counter("tokens")({name: y.numpy()}) == 8
    assert Counter("tokens")({"targets": y.long()}) == 5


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool, np.uint8])
@pytest.mark.parametrize("name", ["targets", "labels"])
def test_types_that_cannot_hold_minus_100_have_nothing_ignored(name, kind):
    values = torch.tensor([[156], [1], [0]])
    values = values.numpy().astype(kind) if kind is np.uint8 else values.to(kind)
    model = nn.Linear(2, 1)

    def loss(model, batch):
        wanted = torch.as_tensor(batch[name]).float()
        return nn.functional.mse_loss(model(batch["x"]), wanted)

    engine = Engine(
        model, torch.optim.SGD(model.parameters(), 0.0), loss=loss, precision="fp32", compile="off"
    )
    assert engine.train_step({"x": torch.ones(3, 2), name: values}).tokens == 3
