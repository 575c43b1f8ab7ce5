"""Methods: each keeps the contract; GPTQ against its algorithm written out."""

from __future__ import annotations

import torch

from lezero.compress.quantize.methods import AWQ, GPTQ, HQQ, Nearest
from lezero.ops.quantize import Grid, dequantize, quantize
from tests.compress.method_conformance import MethodConformance, inputs_of


class TestNearest(MethodConformance):
    method = Nearest


class TestAWQ(MethodConformance):
    method = AWQ


class TestHQQ(MethodConformance):
    method = HQQ


class TestGPTQ(MethodConformance):
    method = GPTQ


def test_gptq_is_its_algorithm():
    """In fp64, column by column, with the inverse of the Hessian as the paper has it."""
    made = torch.Generator().manual_seed(0)
    N, K, grid = 8, 160, Grid("int4", group=32)
    w, x = torch.randn(N, K, generator=made), torch.randn(400, K, generator=made)
    x = x @ torch.randn(K, K, generator=made)
    result = GPTQ().codes(w.clone(), grid, "minmax", inputs_of(x))

    H = x.double().T @ x.double()
    order = torch.argsort(H.diagonal(), descending=True)
    H.diagonal().add_(0.01 * H.diagonal().mean())
    H = H[order][:, order]
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    left, codes = w.double()[:, order], torch.empty(N, K, dtype=torch.uint8)
    single = Grid("int4")
    for k in range(K):
        scale = result.scale[:, order[k] // 32, None]
        column = quantize(left[:, k, None].float(), single, scale=scale)
        codes[:, order[k]] = column.codes[:, 0]
        error = (left[:, k] - dequantize(*column, single)[:, 0].double()) / U[k, k]
        left[:, k:] -= torch.outer(error, U[k, k:])
    assert (codes != result.codes).float().mean() < 0.02  # fp32 rounds a few ties otherwise


def test_layers_that_share_inputs_share_the_factor():
    made = torch.Generator().manual_seed(0)
    inputs = inputs_of(torch.randn(100, 64, generator=made))
    w, grid = torch.randn(8, 64, generator=made), Grid("int4", group=32)
    first = GPTQ().codes(w.clone(), grid, "minmax", inputs)
    assert inputs.hessian is None
    second = GPTQ().codes(w.clone(), grid, "minmax", inputs)
    assert torch.equal(first.codes, second.codes)
