"""A quantized weight in the hands of code that takes it for a tensor: read, not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lezero as lz

WRITES: dict[str, Callable[[Any], Any]] = {
    "init.normal_": nn.init.normal_,
    "init.zeros_": nn.init.zeros_,
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(tensor=w),
    "fill_": lambda w: torch.fill_(w, 1.0),
    "relu_": torch.relu_,
    "relu inplace": lambda w: F.relu(w, inplace=True),
    "out": lambda w: torch.add(torch.ones(32), 1, out=w),
    "outs": lambda w: torch.max(torch.ones(2, 2), 0, out=(w, torch.empty(2))),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "named out of order": lambda w: nn.init.normal_(mean=0.0, tensor=w),
    "inplace first": lambda w: F.relu(inplace=True, input=w),
    "data": lambda w: setattr(w, "data", torch.zeros(32, 32)),
}


def weight(scheme: Any) -> Any:
    torch.manual_seed(0)
    return lz.quantize_(nn.Sequential(nn.Linear(32, 32)), scheme, objective="size")[0].weight


@pytest.mark.parametrize("name", WRITES)
def test_what_would_write_to_it_is_an_error(name: str) -> None:
    made = weight(lz.Fp8())
    before = made.decode()
    with pytest.raises(AttributeError, match="only read"):
        WRITES[name](made)
    assert torch.equal(made.decode(), before)


def test_it_is_read_in_lists_and_written_from() -> None:
    made = weight(lz.Fp8())
    plain, target = made.decode(), torch.zeros(32, 32)
    assert torch.equal(torch.cat([made, made]), torch.cat([plain, plain]))
    assert torch.equal(torch.stack((made, target))[0], plain)
    assert torch.equal(torch._foreach_mul([made], 2.0)[0], 2 * plain)
    assert torch.equal(target.copy_(made), plain)
    torch._foreach_add_([target], [made])
    assert torch.equal(target, 2 * plain)
    assert torch.equal(torch.add(made, 1, out=target), plain + 1)
    target += made
    assert torch.equal(target, plain + 1 + plain)


class Row(list[Any]):
    """A list of a class of its own."""


class Pair(tuple[Any, ...]):
    """A tuple of a class of its own."""


def test_lists_and_tuples_of_any_class_hold_it() -> None:
    made = weight(lz.Fp8())
    plain = made.decode()
    assert torch.equal(torch.reshape(made, torch.Size((64, 16))), plain.reshape(64, 16))
    assert torch.equal(torch.cat(Row([made, made])), torch.cat([plain, plain]))
    assert torch.equal(torch.stack(Pair((made, plain)))[0], plain)
    with pytest.raises(AttributeError, match="only read"):
        torch._foreach_mul_(Row([made]), 2.0)
    assert torch.equal(made.decode(), plain)


READS: dict[str, Callable[[Any], Any]] = {
    "==": lambda w: w == 0,
    "!=": lambda w: w != 0,
    "<": lambda w: w < 0.01,
    "<=": lambda w: w <= 0,
    ">": lambda w: w > 0,
    ">=": lambda w: w >= 0.01,
    "tensor ==": lambda w: torch.zeros(32) == w,
    "abs": abs,
    "+w": lambda w: +w,
    "%": lambda w: w % 2,
    "r%": lambda w: 2 % (w + 3),
    "//": lambda w: w // 0.1,
    "r//": lambda w: 2 // (w + 3),
    "r/": lambda w: 2 / (w + 3),
    "r**": lambda w: 2**w,
    "len": lambda w: torch.tensor(len(w)),
    "iter": lambda w: torch.stack(list(w)),
    "in": lambda w: torch.tensor(7.5 in w),
    "as_tensor": torch.as_tensor,
    "numpy": lambda w: torch.from_numpy(np.asarray(w)),
    "dlpack": torch.from_dlpack,
}


@pytest.mark.parametrize("name", READS)
def test_it_is_read_as_the_decoded_tensor(name: str) -> None:
    made = weight(lz.Int8Weight())
    found, wanted = READS[name](made), READS[name](made.decode())
    assert isinstance(found, Tensor)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_conversions_give_a_tensor() -> None:
    """All that a module and a tensor both have: the module's would convert the weight in place."""
    both = {n for n in dir(nn.Module) if hasattr(Tensor, n) and not n.startswith("_")}
    for name in both - {"requires_grad_"}:
        assert getattr(type(weight(lz.Fp8())), name) is not getattr(nn.Module, name)
    for scheme in (lz.Int8Weight(), lz.Fp8()):
        made = weight(scheme)
        plain, kept = made.decode(), list(made.buffers())
        for name in ("cpu", "double", "float", "half"):
            found = getattr(made, name)()
            assert isinstance(found, Tensor)
            assert torch.equal(found, getattr(plain, name)())
        assert made.dtype == torch.float32
        assert all(x is y for x, y in zip(made.buffers(), kept, strict=True))


def test_a_model_converts_its_weights_all_the_same() -> None:
    model = lz.quantize_(nn.Sequential(nn.Linear(32, 32)), lz.Int8Weight(), objective="size")
    made: Any = model[0].weight
    assert model.cpu()[0].weight is made
    assert model.double()[0].weight is made
    assert made.dtype == torch.float64
    assert made.decode().dtype == torch.float64


def test_16_bits_stay_so_as_a_tensor() -> None:
    model = lz.quantize_(nn.Sequential(nn.Linear(32, 32)).bfloat16(), lz.Fp8(), objective="size")
    assert torch.as_tensor(model[0].weight).dtype == torch.bfloat16


def test_it_is_told_apart_by_identity() -> None:
    one, two = weight(lz.Int8Weight()), weight(lz.Int8Weight())
    assert len({one, two, one}) == 2
    assert [*{one: 1, two: 2}.values()] == [1, 2]


@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Fp8()])
def test_linear_takes_its_arguments_by_name(scheme: Any) -> None:
    made, x, bias = weight(scheme), torch.randn(32, 32), torch.randn(32)
    wanted = F.linear(x, made.decode(), bias)
    for found in (
        F.linear(bias=bias, weight=made, input=x),
        F.linear(x, bias=bias, weight=made),
        F.linear(input=x, weight=made, bias=bias),
        F.linear(x, made, bias),
    ):
        assert torch.allclose(found, wanted, atol=1e-3)
    row = weight(scheme)
    assert torch.equal(F.linear(made, torch.eye(32)), made.decode())
    assert torch.allclose(F.linear(x, made, row[0]), wanted - bias + row.decode()[0], atol=1e-3)


SCHEMES = pytest.mark.parametrize("scheme", [lz.Fp8(), lz.Nf4(vocabulary="nf4"), lz.Int8Weight()])


@SCHEMES
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (), (2, 3)])
def test_ids_of_any_shape_give_rows(scheme: Any, shape: tuple[int, ...]) -> None:
    words, ids = nn.Embedding(48, 64), torch.randint(0, 48, shape)
    wanted = words(ids)
    made = lz.quantize_(nn.Sequential(words), scheme, objective="size")(ids)
    assert made.shape == wanted.shape
    assert made.dtype == wanted.dtype


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(64, 64), nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.words(ids)))


def test_nf4_compiles_whole_and_exports() -> None:
    torch.manual_seed(0)
    model = lz.quantize_(Words().eval(), lz.Nf4(vocabulary="nf4"), objective="size")
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        batch = {0: torch.export.Dim("batch", min=2, max=64)}
        exported = torch.export.export(
            model, (torch.randint(0, 64, (4, 6)),), dynamic_shapes=(batch,)
        )
        for rows in (2, 5, 7):
            ids = torch.randint(0, 64, (rows, 6))
            assert torch.allclose(compiled(ids), model(ids), atol=1e-6)
            assert torch.allclose(exported.module()(ids), model(ids), atol=1e-6)


@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Fp8()], ids=lambda x: type(x).__name__)
def test_a_transposed_weight_reads_as_the_float_layers(scheme: Any) -> None:
    """Also a square one, whose shape does not tell."""
    kind = pytest.importorskip("transformers.pytorch_utils").Conv1D
    for N, K in ((64, 64), (96, 64)):
        torch.manual_seed(0)
        layer, x = kind(N, K), torch.randn(5, K)
        nn.init.normal_(layer.weight)
        weight = lz.quantize_(nn.Sequential(layer), scheme, objective="size")[0].weight
        wanted = layer(x) - layer.bias
        plain: Any = weight
        if N == K:
            assert torch.equal(F.linear(x, plain), F.linear(x, weight.decode()))
        for product in (x @ plain, x @ weight.decode(), F.linear(x, plain.T)):
            torch.testing.assert_close(product, wanted, rtol=1e-3, atol=1e-2)
        assert (*plain.shape, plain.size(0), len(plain)) == (K, N, K, K)
        assert torch.equal(lz.dequantize_(nn.Sequential(layer))[0].weight, weight.decode())


def test_another_weight_is_not_taken() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    for other in (nn.Parameter(torch.zeros(64, 64)), torch.zeros(64, 64)):
        with pytest.raises(AttributeError, match=r"^weight: .* is only read; lz\.dequantize_"):
            model[0].weight = other
    model(torch.zeros(2, 64))
