import json
import random

import numpy as np
import pytest
import torch

from lezero.checkpoint import pack_random, unpack_random
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
