"""A sharded module is filled from a file before it is sharded."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.core.errors import OrderError
from lezero.hub import from_pytorch
from lezero.parallel.zero import Zero, full_state_dict, shard_


def given_a_file(stage, path):
    """What the error says, and the weights then."""
    model, said = shard_(nn.Linear(3, 4), Zero(stage=stage)), ""
    assert from_pytorch(model) is model
    try:
        from_pytorch(model, path)
    except OrderError as error:
        said = str(error)
        model.load_state_dict(torch.load(path))
    return said, full_state_dict(model)


@pytest.mark.parametrize("stage", range(4))
def test_a_file_for_a_sharded_module_is_refused_where_no_rank_has_whole_weights(
    ranks, tmp_path, stage
):
    wanted = nn.Linear(3, 4).state_dict()
    torch.save(wanted, tmp_path / "model.pt")
    (said, state), (other, _) = ranks(2, given_a_file, stage, tmp_path / "model.pt")
    assert said == other
    assert bool(said) == (stage > 0)
    assert "before lz.shard_, or module.load_state_dict" in said or not said
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
