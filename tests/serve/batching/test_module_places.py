"""Modules from files of a user's, and programs that torch.export made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.serve.batching.module import InferModule, module_of
from tests.serve.server.batch_running import Net


def test_the_working_folder_is_first_and_errors_name_the_file_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\ndef make(): return torch.nn.Linear(2, {}), torch.zeros(1, 2)\n"
    for place, wide in (("installed", 1), ("here", 7)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a_users_twin.py").write_text(text.format(wide))
    (tmp_path / "here" / "random.py").write_text(text.format(1))
    monkeypatch.chdir(tmp_path / "here")
    others = [str(tmp_path / "installed"), *sys.path, str(tmp_path / "here")]
    monkeypatch.setattr(sys, "path", others)
    model = module_of("a_users_twin:make")
    assert model.run([{"input": torch.zeros(2)}])[0]["output"].shape == (7,)
    count = len(sys.path)
    with pytest.raises(ConfigError, match=rf"no gone in {tmp_path / 'here'}/a_users_twin\.py"):
        module_of("a_users_twin:gone")
    assert len(sys.path) == count
    with pytest.raises(ConfigError, match=r"no make in .*random\.py, which was imported already"):
        module_of("random:make")
    with pytest.raises(ConfigError, match="no make in a module within Python"):
        module_of("time:make")
    sys.modules.pop("a_users_twin")


class Beside(nn.Module):
    """An exported program in a module that has a mode of its own."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program, self.drops = program, nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drops(self.program(x))


@pytest.mark.parametrize("wrap", [lambda module: module, Beside])
def test_an_exported_program_keeps_its_mode(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net = Net().eval().layers
    sizes = ({0: torch.export.Dim("rows", max=64)},)
    program = torch.export.export(net, (torch.zeros(2, 4),), dynamic_shapes=sizes).module()
    model = InferModule(wrap(program), torch.zeros(1, 4))
    x = torch.randn(5, 4)
    found = model.run(model.rows({"input": x})[0])
    torch.testing.assert_close(torch.stack([row["output"] for row in found]), net(x))
