"""Quantized embeddings in a model: in other types, and traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz


@pytest.mark.parametrize(
    "scheme",
    [lz.Int8Weight(), lz.Fp8(), lz.Fp8(group="tensor"), lz.Nf4(group=32, vocabulary="nf4")],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_torch_traces_them(scheme: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 64)).eval()
    x, y = torch.randint(0, 40, (2, 3, 5))
    lz.quantize_(model, scheme, data=x, objective="size")
    traced = torch.jit.trace(model, (x,))
    assert torch.equal(traced(y), model(y))
    traced.save(str(tmp_path / "traced.pt"))
    assert torch.equal(torch.jit.load(str(tmp_path / "traced.pt"))(y), model(y))


@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Int4Weight(group=32, vocabulary="int4")])
def test_an_embedding_that_was_made_fp64_says_how_to_go_back(scheme: Any) -> None:
    model = nn.Sequential(nn.Embedding(40, 128), nn.Linear(128, 64))
    ids = torch.randint(0, 40, (2, 5))
    lz.quantize_(model, scheme, data=[ids], objective="size")
    wanted, said = model(ids), rf"rows would be torch\.float64, .* {scheme.vocabulary} are fp32, .*"
    with pytest.raises(lz.ConfigError, match=said + r"with model\.float\(\)"):
        model.double()(ids)
    assert torch.equal(model.float()(ids), wanted)
