import json
import random

import numpy as np
import pytest
import torch

from lezero.checkpoint import pack_random, random_state, unpack_random
from lezero.core.errors import FileError
from lezero.files import read_generation, write_generation


def draw():
    return [
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
    ]


def test_every_generator_goes_on_where_it_was(tmp_path):
    draw()  # leaves a cached second Gaussian in Python's and numpy's generators
    tensors, document = pack_random()
    json.dumps(document, allow_nan=False)
    path = write_generation(tmp_path, 1, tensors=tensors, documents={"random": document})
    expected = [draw(), draw()]
    read = read_generation(path)
    unpack_random(read.tensors, read.documents["random"])
    assert [draw(), draw()] == expected


def test_missing_and_damaged_states_are_told():
    tensors, document = pack_random()
    with pytest.raises(FileError, match="missing: 'random/torch'"):
        unpack_random({k: v for k, v in tensors.items() if k != "random/torch"}, document)
    with pytest.raises(FileError, match="damaged"):
        unpack_random({**tensors, "random/torch": torch.zeros(3)}, document)


class Cuda:
    """Generators of two devices, of which the first one is current."""

    def __init__(self, monkeypatch) -> None:
        self.states = [torch.full((16,), index, dtype=torch.uint8) for index in range(2)]
        monkeypatch.setattr(random_state, "accelerator", lambda: "cuda")
        monkeypatch.setattr(random_state, "count", lambda: 2)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: self)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)

    def get_rng_state(self, index=0):
        return self.states[index].clone()

    def set_rng_state(self, state, index=0):
        self.states[index] = state


def test_devices_of_the_model_go_on_too(monkeypatch):
    cuda = Cuda(monkeypatch)
    places = {torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)}
    tensors, document = pack_random(places=places)
    assert [name for name in tensors if "cuda" in name] == ["random/cuda", "random/cuda:1"]
    cuda.states = [torch.zeros(0)] * 2
    unpack_random(tensors, document)
    assert [int(state[0]) for state in cuda.states] == [0, 1]
    tensors.pop("random/cuda:1")  # as it was saved before
    unpack_random(tensors, document)
