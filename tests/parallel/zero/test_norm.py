"""The two ways to take sums of squares: by pieces on a processor, at once on an accelerator."""

from __future__ import annotations

import pytest
import torch

from lezero.parallel.zero import norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_agree_in_fp64(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    some = [torch.randn(700, 1000).to(dtype), None, torch.randn(5).to(dtype), torch.empty(0, 3)]
    pieces, once = norm.squares(some, cpu), norm.at_once(some, cpu)
    assert once.dtype == pieces.dtype == torch.float64
    assert pieces[0] == pytest.approx(some[0].double().square().sum().item(), rel=1e-12)
    assert torch.allclose(pieces, once, rtol=1e-12, atol=0)
    assert once[1] == once[3] == 0
    assert norm.at_once([None, None], cpu).tolist() == [0, 0]
