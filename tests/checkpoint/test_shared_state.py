import json
from collections import OrderedDict, defaultdict

import numpy as np
import torch
from torch import nn

from lezero.checkpoint import pack_optimizer, unpack_optimizer
from lezero.train import Engine

LEFT_OUT = {
    "common": ({"of": {1}, "kept": 5}, "state['common']['of'] of the optimizer is of type set"),
    "numbered": ({2: 1}, "state['numbered'][2] of the optimizer has a key of type int"),
    7: ({}, "state[7] of the optimizer has a key of type int"),
    "hook": (print, "state['hook'] of the optimizer is of type builtin"),
    "twice": (
        {"b/c": torch.ones(1), "b": {"c": torch.ones(1)}},
        "another tensor is 'optimizer/.shared/twice/b/c' too",
    ),
    "seen": (
        [torch.ones(3)],
        "an item of state['seen'] of the optimizer is a tensor of shape (3,)",
    ),
}


def test_shared_state_that_cannot_be_saved_is_named_once_and_left_out(caplog):
    module = nn.Linear(4, 2)
    names = dict(module.named_parameters())
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.state.update({key: value for key, (value, _) in LEFT_OUT.items()})
    for _ in range(2):
        tensors, document = pack_optimizer(optimizer, names)
    assert len(caplog.records) == 1
    assert all(said in caplog.text for _, said in LEFT_OUT.values())
    optimizer.state["later"] = {1}
    pack_optimizer(optimizer, names)
    assert len(caplog.records) == 2
    assert "'later'" in caplog.records[1].message
    assert "'hook'" not in caplog.records[1].message

    document = json.loads(json.dumps(document))
    fresh = torch.optim.SGD(module.parameters())
    unpack_optimizer(fresh, names, tensors, document)
    assert fresh.state["common"] == {"kept": 5}
    assert set(fresh.state) == {"common", "twice"}
    fresh.state.update({"hook": min, 7: 8, "common": {"of": {2}, "kept": 6}, "new": 1})
    unpack_optimizer(fresh, names, tensors, document)
    assert fresh.state["common"] == {"of": {2}, "kept": 5}
    assert fresh.state["hook"] is min
    assert fresh.state[7] == 8
    assert "new" not in fresh.state


def test_shared_state_that_holds_itself_is_left_out(caplog):
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.state["turning"] = turning = {"a": 1}
    turning["again"] = turning
    optimizer.state["list"] = turning = []
    turning.append(turning)
    _, document = pack_optimizer(optimizer, dict(module.named_parameters()))
    assert "nested more than" in caplog.text
    assert "list that is nested too deep" in caplog.text
    json.dumps(document)


def test_shared_state_in_dictionaries_of_other_kinds_comes_back(caplog):
    module = nn.Linear(4, 2)
    names = dict(module.named_parameters())
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.state["ordered"] = OrderedDict(b=torch.ones(2), a=np.bool_(True))
    optimizer.state["made"] = defaultdict(int, a=1)
    tensors, document = pack_optimizer(optimizer, names)
    assert caplog.text == ""
    fresh = torch.optim.SGD(module.parameters())
    fresh.state["made"] = defaultdict(int, b=7)
    unpack_optimizer(fresh, names, tensors, json.loads(json.dumps(document)))
    assert list(fresh.state["ordered"]) == ["b", "a"]
    assert fresh.state["ordered"]["b"].tolist() == [1.0, 1.0]
    assert fresh.state["ordered"]["a"] is True
    assert fresh.state["made"] == {"a": 1}
    assert fresh.state["made"]["c"] == 0


class LateHistory(torch.optim.SGD):
    def step(self, closure=None):
        self.state["history"] = {1, 2}
        return super().step(closure)


def test_a_save_survives_state_that_is_made_late(tmp_path, caplog):
    module = nn.Linear(4, 2)
    optimizer = LateHistory(module.parameters(), lr=0.1)

    def loss(module, batch):
        return module(batch["x"]).square().mean()

    engine = Engine(module, optimizer, loss=loss, compile="off", precision="fp32")
    for _ in range(2):
        engine.train_step({"x": torch.randn(4, 4)})
        engine.save(tmp_path)
    assert caplog.text.count("state['history'] of the optimizer is of type set") == 1
    engine.load(tmp_path)
    assert optimizer.state["history"] == {1, 2}


def test_an_engine_says_at_once_that_shared_state_cannot_be_saved(caplog):
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters())
    Engine(module, optimizer, compile="off")
    assert "leave out" not in caplog.text
    optimizer.state["hook"] = print
    Engine(module, optimizer, compile="off")
    assert "saves leave out state of the optimizer" in caplog.text
    assert "state['hook']" in caplog.text
