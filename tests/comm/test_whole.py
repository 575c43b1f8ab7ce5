"""Whoever makes a tensor whole tells the watch which one it is."""

from __future__ import annotations

import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.comm.whole import whole
from lezero.core import observer
from lezero.jobs.exchange import whole_gradients
from lezero.models.hf_writing import export
from lezero.parallel.zero import Zero, full_parameters, full_state_dict, shard_, sharding_of


class Listener:
    def __init__(self):
        self.heard = []

    def enter(self, op, shape, dtype, label):
        self.heard.append((op, tuple(shape), dtype, label))

    def leave(self):
        self.heard.append("left")


def told():
    """What the watch hears of each way to whole tensors, and what comes of it."""
    torch.manual_seed(0)
    model = shard_(nn.Linear(3, 4, bias=False), Zero(stage=3))
    model(torch.ones(2, 3)).sum().backward()
    ways = {
        "parameters": lambda: dict(full_parameters(model)),
        "state": lambda: full_state_dict(model),
        "export": lambda: export(model),
        "gradients": lambda: whole_gradients(model, torch.device("cpu")),
    }
    before, found = observer.current(), {}
    for name, way in ways.items():
        listener = Listener()
        observer.observe(listener)
        try:
            made = way()
        finally:
            observer.observe(before)
        found[name] = listener.heard, {key: value.tolist() for key, value in made.items()}
    sharding_of(model).close()
    return found


def test_every_gather_of_a_whole_tensor_is_named(ranks):
    torch.manual_seed(0)
    weight = nn.Linear(3, 4, bias=False).weight.detach().tolist()
    found = ranks(2, told)[0]
    for name, (heard, made) in found.items():
        label = "gradient of weight" if name == "gradients" else "weight"
        assert heard == [("all_gather", (4, 3), torch.float32, label), "left"], name
        assert made == {"weight": [[2.0] * 3] * 4 if name == "gradients" else weight}, name


def test_a_plain_tensor_is_whole_already():
    x = torch.ones(2)
    assert whole(x, "x") is x
