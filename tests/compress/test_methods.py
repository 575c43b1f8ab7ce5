"""Methods: each keeps the contract; GPTQ against its algorithm written out."""

from __future__ import annotations

import pytest
import torch

import lezero as lz
from lezero.compress.quantize.methods import AWQ, GPTQ, HQQ, Method, Nearest, hqq
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


def test_hqq_has_less_of_the_error_of_its_paper_and_takes_more_than_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mean |w - ŵ|^0.7."""
    w, grid = torch.randn(64, 512), Grid("int4", 32, True, "fp16")

    def error(method: Method) -> float:
        found = dequantize(*method.codes(w.clone(), grid, "minmax", None), grid)
        return float((found - w).abs().pow(0.7).mean())

    plain, all_turns = error(Nearest()), error(HQQ())
    monkeypatch.setattr(hqq, "_ROUNDS", 1)
    one_turn = error(HQQ())
    assert all_turns < 0.96 * plain
    assert one_turn < 0.99 * plain
    assert all_turns < 0.98 * one_turn


@pytest.mark.parametrize("method", [Nearest, AWQ, GPTQ])
def test_mse_scales_weigh_errors_by_the_inputs(method):
    made = torch.Generator().manual_seed(0)
    w, grid = torch.tensor([[0.9, 0.33, -0.21, 0.47] * 8]), Grid("int4", group=32)
    x = torch.randn(200, 32, generator=made)
    plain = method().codes(w.clone(), grid, "mse", inputs_of(torch.ones(64, 32)))
    x[:, ::4] *= 1e-3  # of the largest weights
    assert float(method().codes(w.clone(), grid, "mse", inputs_of(x)).scale) < float(plain.scale)


@pytest.mark.parametrize("size", [1e-25, 1e-21, 1e-19, 1e-15, 1e15])
def test_gptq_takes_inputs_of_any_size(size):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    x = torch.randn(48, 64) @ torch.randn(64, 64) * size
    wanted = layer(x)
    scheme = lz.Int4Weight(group=32, method="gptq")
    lz.quantize_(layer, scheme, data=x, objective="size")
    assert float((layer(x) / size - wanted / size).norm() / (wanted / size).norm()) < 0.15


def test_gptq_keeps_weights_of_inputs_that_calibration_did_not_reach():
    made = torch.Generator().manual_seed(0)
    w, grid = torch.randn(8, 64, generator=made), Grid("int4", group=32)
    x = torch.randn(100, 64, generator=made)
    x[:, 5] = 0
    codes = GPTQ().codes(w.clone(), grid, "minmax", inputs_of(x))
    assert float((dequantize(*codes, grid)[:, 5] - w[:, 5]).abs().max()) < 0.25


def test_gptq_names_the_layers_whose_inputs_it_cannot_use() -> None:
    w, inputs = torch.randn(8, 64), inputs_of(torch.randn(100, 64))
    inputs.layers.append("other")
    assert inputs.hessian is not None
    inputs.hessian[0, 1] = inputs.hessian[1, 0] = 1e9
    with pytest.raises(lz.NumericsError, match="of the inputs of layer, other is not positive"):
        GPTQ().codes(w, Grid("int4", group=32), "minmax", inputs)


def test_layers_that_share_inputs_share_the_factor():
    made = torch.Generator().manual_seed(0)
    inputs = inputs_of(torch.randn(100, 64, generator=made))
    w, grid = torch.randn(8, 64, generator=made), Grid("int4", group=32)
    first = GPTQ().codes(w.clone(), grid, "minmax", inputs)
    assert inputs.hessian is None
    second = GPTQ().codes(w.clone(), grid, "minmax", inputs)
    assert torch.equal(first.codes, second.codes)
