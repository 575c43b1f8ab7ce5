"""The first calls that settle torch's functions, and who makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lezero as lz
from lezero.core.first_calls import settle_first_calls
from lezero.serve.batching.module import InferModule


class Seen(TorchDispatchMode):
    """Notes which functions were called for one number."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
            self.names.add(f"{func.overloadpacket.__name__} {args[0].dtype}")
        return func(*args, **(kwargs or {}))


def engine() -> None:
    model = nn.Linear(4, 4)
    lz.Engine(model, torch.optim.SGD(model.parameters(), 0.1))


def module() -> None:
    InferModule(nn.Linear(4, 4), torch.ones(1, 4))


@pytest.mark.parametrize("make", [settle_first_calls, engine, module])
def test_functions_are_called_for_one_number_first(make) -> None:  # type: ignore[no-untyped-def]
    state = torch.get_rng_state()
    with Seen() as seen:
        make()
    for name in ("exp", "log", "sin", "cos", "tanh", "erf"):
        assert {f"{name} torch.float32", f"{name} torch.float64"} <= seen.names
    if make is settle_first_calls:
        assert torch.equal(torch.get_rng_state(), state)


def test_an_llm_makes_them_too(tmp_path: Path) -> None:
    model = lz.models.Transformer(lz.models.TransformerConfig(vocab=32, dim=32, layers=1, heads=2))
    with Seen() as seen:
        lz.LLM(model)
    assert "exp torch.float32" in seen.names
