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


def test_what_it_knows_nothing_about_passes():
    check_token_ids(MODEL, batch(49))
    check_token_ids(MODEL, (torch.tensor([99]),))
    check_token_ids(MODEL, {"tokens": torch.zeros(0, 4, dtype=torch.long)})
    check_token_ids(torch.nn.Linear(1, 1), batch(99))
    check_token_ids(MODEL, {"tokens": torch.empty(2, 3, dtype=torch.long, device="meta")})
