"""Modules whose tensors lie in the same memory without being one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lezero.core.errors import FileError
from lezero.hub import from_pytorch


class Slices(nn.Module):
    """Two slices of one tensor, `apart` or with two numbers in common."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        whole = torch.zeros(8)
        self.a = nn.Parameter(whole[:4])
        self.b = nn.Parameter(whole[4:] if apart else whole[2:6])
        self.c = nn.Parameter(torch.zeros(2))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("q", self.p.detach()[:2])


class Data(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.Linear(2, 3)
        self.b.weight = nn.Parameter(self.a.weight.data)


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.register_buffer("m", torch.ones(1).expand(4))
        self.l = nn.Linear(2, 2)


def saved(state: dict[str, Tensor], folder: Path) -> Path:
    path = folder / "x.pt"
    torch.save({name: x.clone() for name, x in state.items()}, path)
    return path


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Slices(apart=False), "'a' and 'b' differ in the file, but they share memory"),
        (Buffered(), "'p' and 'q' differ in the file, but they share memory"),
        (Data(), "'a.weight' and 'b.weight' differ in the file, but they share memory"),
        (Expanded(), "'m' of the module is an expanded tensor"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_one_memory_cannot_hold_is_refused_and_changes_nothing(
    module: nn.Module, said: str, tmp_path: Path
) -> None:
    before = {name: x.clone() for name, x in module.state_dict().items()}
    torch.manual_seed(0)
    path = saved({name: torch.randn(x.shape).to(x.dtype) for name, x in before.items()}, tmp_path)
    with pytest.raises(FileError, match=said):
        from_pytorch(module, path)
    for name, x in module.state_dict().items():
        assert torch.equal(x, before[name]), name


@pytest.mark.parametrize("module", [Slices(apart=False), Slices(apart=True), Buffered(), Data()])
def test_values_that_agree_are_loaded(module: nn.Module, tmp_path: Path) -> None:
    state = module.state_dict()
    with torch.no_grad():
        for x in state.values():
            x.copy_(torch.randn(x.shape))
    wanted = {name: x.clone() for name, x in state.items()}
    path = saved(wanted, tmp_path)
    with torch.no_grad():
        for x in state.values():
            x.fill_(math.nan)
    from_pytorch(module, path)
    for name, x in module.state_dict().items():
        assert torch.equal(x, wanted[name]), name


class Bytes(nn.Module):
    """Views of different types, which begin at odd places."""

    def __init__(self) -> None:
        super().__init__()
        raw = torch.zeros(12, dtype=torch.uint8)
        self.register_buffer("a", raw[2:12])
        self.register_buffer("b", raw[4:8].view(torch.float32))


def test_views_of_other_types(tmp_path: Path) -> None:
    module = Bytes()
    module.b.fill_(1.5)
    path = saved(module.state_dict(), tmp_path)
    module.a.zero_()
    from_pytorch(module, path)
    assert float(module.b) == 1.5


def test_pieces_of_one_memory_that_lie_apart_take_any_values(tmp_path: Path) -> None:
    module = Slices(apart=True)
    wanted = {name: torch.randn(x.shape) for name, x in module.state_dict().items()}
    from_pytorch(module, saved(wanted, tmp_path))
    for name, x in module.state_dict().items():
        assert torch.equal(x, wanted[name]), name
