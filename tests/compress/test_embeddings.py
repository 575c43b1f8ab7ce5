"""Quantized embeddings in a model: in other types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz


@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Int4Weight(group=32, vocabulary="int4")])
def test_an_embedding_that_was_made_fp64_says_how_to_go_back(scheme: Any) -> None:
    model = nn.Sequential(nn.Embedding(40, 128), nn.Linear(128, 64))
    ids = torch.randint(0, 40, (2, 5))
    lz.quantize_(model, scheme, data=[ids], objective="size")
    wanted, said = model(ids), rf"rows would be torch\.float64, .* {scheme.vocabulary} are fp32, .*"
    with pytest.raises(lz.ConfigError, match=said + r"with model\.float\(\)"):
        model.double()(ids)
    assert torch.equal(model.float()(ids), wanted)
