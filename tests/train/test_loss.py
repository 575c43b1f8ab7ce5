"""How a batch is cut, and what a model must return."""

import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.train.loss import model_loss, split


def test_a_cut_keeps_every_sample_and_gives_tensors_without_dims_to_each():
    batch = {"x": torch.arange(7), "pair": (torch.arange(7), "text"), "scale": torch.tensor(2.0)}
    parts = split(batch, 3)
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), batch["x"])
    assert [part["scale"].item() for part in parts] == [2.0, 2.0, 2.0]
    assert [part["pair"][1] for part in parts] == ["text"] * 3


@pytest.mark.parametrize("rows", [4, 40])
def test_a_tensor_that_is_not_one_row_a_sample_is_refused_wherever_it_stands(rows):
    weights, x = torch.ones(rows), torch.ones(32, 16)
    with pytest.raises(ConfigError, match=rf"'class_weights' has {rows}, 'x' has 32"):
        split({"class_weights": weights, "x": x}, 2)
    with pytest.raises(ConfigError, match=rf"'x' has 32, 'class_weights' has {rows}"):
        split({"x": x, "class_weights": weights}, 2)
    with pytest.raises(ConfigError, match=rf"0 has 32, 1 has {rows}"):
        split((x, weights), 2)
    ready = [{"class_weights": weights, "x": x}] * 2
    assert split(ready, 2) is ready


def test_a_model_must_return_a_scalar():
    with pytest.raises(ConfigError, match="the model returned no scalar loss"):
        model_loss(nn.Linear(2, 2), torch.ones(3, 2))
