"""A token outside the vocabulary is told as such, in every form that the model runs in."""

import pytest
import torch

from lezero.core.errors import ConfigError
from lezero.models import Transformer, TransformerConfig
from lezero.train.engine import Engine
from lezero.train.loss import next_token_loss
from lezero.train.token_ids import check_token_ids

MODEL = Transformer(TransformerConfig(vocab=50, dim=8, layers=1, heads=1))


def batch(token):
    tokens = torch.zeros(4, 6, dtype=torch.long)
    tokens[3, 2] = token
    return {"tokens": tokens, "targets": torch.zeros_like(tokens)}


@pytest.mark.parametrize("form", ["off", "step"])
@pytest.mark.parametrize("token", [50, -1])
def test_the_engine_names_the_token_and_the_vocabulary(token, form):
    optimizer = torch.optim.SGD(MODEL.parameters(), 0.1)
    engine = Engine(
        MODEL, optimizer, loss=next_token_loss, compile=form, precision="fp32", accumulate=2
    )
    message = f"tokens: got token {token}, allowed is 0 to 49 .*vocabulary of 50"
    with pytest.raises(ConfigError, match=message):
        engine.train_step(batch(token))
    with pytest.raises(ConfigError, match=message):
        engine.evaluate([batch(0), batch(token)])


@pytest.mark.parametrize("field", ["tokens", "targets"])
def test_what_is_no_token_id_is_told_by_its_type(field):
    engine = Engine(
        MODEL, torch.optim.SGD(MODEL.parameters(), 0.1), loss=next_token_loss, precision="fp32"
    )
    wrong = {**batch(0), field: batch(0)[field].float()}
    with pytest.raises(ConfigError, match=rf"^{field}: got a tensor of torch.float32, .*long\(\)"):
        engine.train_step(wrong)


def test_a_target_outside_the_vocabulary_is_told_as_a_token_is():
    wrong = batch(0)
    wrong["targets"][1, 2] = 99
    message = r"^targets: got target 99, allowed is 0 to 49 .*, or -100 .* Use the tokenizer"
    with pytest.raises(ConfigError, match=message):
        next_token_loss(MODEL, wrong)


@pytest.mark.parametrize("compile", ["auto", "off"])
def test_a_batch_without_targets_is_told_what_the_loss_needs(compile):
    engine = Engine(
        MODEL, torch.optim.SGD(MODEL.parameters(), 0.1), loss=next_token_loss, precision="fp32",
        compile=compile,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"got 'tokens'; .* \(targets missing\)"):
        engine.train_step({"tokens": batch(0)["tokens"]})
    with pytest.raises(ConfigError, match=r"got a Tensor; .* \(tokens and targets missing\)"):
        engine.train_step(batch(0)["tokens"])


def test_why_nothing_counts_or_is_there_to_evaluate():
    engine = Engine(
        MODEL, torch.optim.SGD(MODEL.parameters(), 0.1), loss=next_token_loss, precision="fp32"
    )
    with pytest.raises(ConfigError, match="nothing in this batch counts: it has no samples"):
        engine.train_step({name: value[:0] for name, value in batch(0).items()})
    masked = {**batch(0), "targets": torch.full_like(batch(0)["targets"], -100)}
    with pytest.raises(ConfigError, match="nothing in this batch counts: every target is masked"):
        engine.train_step(masked)
    with pytest.raises(ConfigError, match="no batch to evaluate"):
        engine.evaluate([])


def test_what_it_knows_nothing_about_passes():
    check_token_ids(MODEL, batch(49))
    check_token_ids(MODEL, (torch.tensor([99]),))
    check_token_ids(MODEL, {"tokens": torch.zeros(0, 4, dtype=torch.long)})
    check_token_ids(torch.nn.Linear(1, 1), batch(99))
    check_token_ids(MODEL, {"tokens": torch.empty(2, 3, dtype=torch.long, device="meta")})
