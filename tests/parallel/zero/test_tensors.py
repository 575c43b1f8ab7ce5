"""Which tensors of a block are found, and what is left alone."""

from __future__ import annotations

import dataclasses
import types
from collections import UserDict
from typing import Any

import torch
from torch import nn

from lezero.parallel.zero.tensors import new_tensors


@dataclasses.dataclass
class Config:
    parent: Any = None
    children: list[Any] = dataclasses.field(default_factory=list)


def fresh():
    return torch.ones(2, requires_grad=True) * 2


class Asked(UserDict):
    def values(self):
        raise AssertionError("a store that loads what is asked for")


def test_attributes_that_hold_each_other_or_very_much_are_no_trouble():
    block = nn.Linear(2, 2)
    config = Config()
    config.children += [Config(parent=config), [config]]
    block.config, block.store, block.words = config, Asked(), list(range(10**6))
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    block.deep = deep
    block.loss = config.children[0].children
    loss = fresh()
    block.loss.append(loss)
    assert new_tensors(block, None) == [loss]
    assert new_tensors(block, None) == []


def test_all_that_is_returned_is_found():
    tensors = [fresh() for _ in range(4)]
    holder = types.SimpleNamespace(loss=tensors[0], more={"a": (tensors[1],)})
    holder.itself = holder
    output = UserDict(one=holder, two=Config(parent=[tensors[2], {"x": tensors[3]}]))
    assert {id(tensor) for tensor in new_tensors(None, output)} == {id(t) for t in tensors}
