"""The LSTM of the CPU: what it keeps for backward and what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.plan.calls import Call
from lezero.plan.lstm import LSTM
from lezero.plan.spec import StepSpec
from lezero.plan.trace import trace_step
from lezero.plan.work import Most, flops, shrink
from lezero.profiler.flops import count_flops


class Reader(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.table(tokens))[0])


def layer(model: Reader, batch: int, tokens: int) -> Call:
    trace = trace_step(lambda: model, StepSpec(batch=batch, tokens=tokens))
    return next(call for key, call in trace.calls.items() if key.startswith(LSTM))


@pytest.mark.parametrize(
    ("width", "hidden", "batch", "tokens"),
    [(64, 96, 4, 40), (256, 512, 16, 33), (33, 65, 7, 10), (700, 900, 8, 50)],
)
def test_the_workspace_is_as_large_as_a_real_one(width, hidden, batch, tokens) -> None:
    model = Reader(width, hidden)
    found = layer(model, batch, tokens).outputs[3].bytes
    weights = [w.detach() for w in model.lstm.parameters()]
    state = torch.zeros(batch, hidden)
    real = torch.ops.aten.mkldnn_rnn_layer(
        torch.zeros(tokens, batch, width), *weights, state, state.clone(),
        False, [], 2, hidden, 1, True, False, False, True,
    )  # fmt: skip
    assert found == pytest.approx(real[3].numel(), rel=0.06)


def test_its_products_count_and_it_is_tried_with_fewer_steps() -> None:
    model = Reader()
    call = layer(model, 4, 40)
    products = 2 * 4 * 40 * 4 * 96 * (64 + 96)
    assert flops(call) == products
    smaller, scale = shrink(call, Most(1 << 30, products / 3))
    assert (smaller.args[0].shape[0], scale) == (10, 4)
    counted = count_flops(model.lstm, torch.zeros(4, 40, 64))
    assert (counted.forward, counted.backward) == (products, 2 * products)
