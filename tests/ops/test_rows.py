"""Packed weights in rows, as accelerators read them: the same codes, and the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.linear import (
    Packed,
    embedding_int,
    from_rows,
    in_rows,
    layout,
    linear_int,
    reference,
    rows,
    to_rows,
    unpack,
)
from tests.ops.test_linear import FLOATS, packed, seeded

SHAPES = [(1, 1), (16, 64), (33, 300), (47, 511), (5, 1025)]
"""N, K."""
FORMS = [
    (bits, group, zero) for bits in (4, 8) for group in (0, 32, 64, 96) for zero in (False, True)
]


def alike(one: Packed, two: Packed) -> bool:
    pairs = zip(one, two, strict=True)
    return all(x is y is None or torch.equal(x, y) for x, y in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bits", "group", "zero"), FORMS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_rows_and_panels_hold_the_same_codes(
    N: int, K: int, bits: int, group: int, zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "AT_ONCE", 16 * K)  # in parts
    panels = packed(N, K, bits, group, zero, torch.float16)
    made = to_rows(panels, N, K, bits, group)
    assert in_rows(made)
    assert not in_rows(panels)
    assert all(x is None or (x.is_contiguous() and len(x) == N) for x in made)
    assert alike(from_rows(made, N, K, bits, group), panels)
    codes = unpack(panels, N, K, bits=bits, group=group)
    assert alike(unpack(made, N, K, bits=bits, group=group), codes)
    assert to_rows(made, N, K, bits, group) is made
    assert from_rows(panels, N, K, bits, group) is panels


@pytest.mark.parametrize("group", [0, 32, 64, 96, 128])
def test_four_bits_lie_where_the_formula_says(group: int) -> None:
    N, K = 3, 700
    panels = packed(N, K, 4, group, False, torch.float32)
    codes = unpack(panels, N, K, bits=4, group=group).weight
    words = to_rows(panels, N, K, 4, group).weight
    J = 64 if group in (0, 64, 128) else 32
    assert words.shape == (N, -(-K // (8 * J)) * J)
    found = torch.zeros(N, words.shape[1] * 8, dtype=torch.uint8)
    for k in range(found.shape[1]):
        block, i, j = k // (8 * J), k // J % 8, k % J
        found[:, k] = words[:, block * J + j] >> 4 * i & 15
    assert torch.equal(found[:, :K], codes)
    assert not found[:, K:].any()


@pytest.mark.parametrize("zero", [False, True])
def test_eight_bits_are_signed_and_filled_up_to_16_inputs(zero: bool) -> None:
    panels = packed(5, 70, 8, 32, zero, torch.float32)
    codes = unpack(panels, 5, 70, bits=8, group=32).weight
    made = to_rows(panels, 5, 70, 8, 32).weight
    assert made.dtype == torch.int8
    assert made.shape == (5, 80)
    assert torch.equal(made[:, :70].int(), codes.int() - (128 if zero else 0))
    assert not made[:, 70:].any()


def test_a_large_weight_is_turned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    panels, seen = packed(100, 64, 4, 32, False, torch.float32), []

    def spy(codes: Tensor, *rest: int) -> Tensor:
        seen.append(len(codes))
        return real(codes, *rest)

    real = rows.encode
    monkeypatch.setattr(rows, "encode", spy)
    monkeypatch.setattr(rows, "AT_ONCE", 48 * 64)
    to_rows(panels, 100, 64, 4, 32)
    assert seen == [48, 48, 4]


@pytest.mark.parametrize("x_bits", [8, 16])
@pytest.mark.parametrize(("bits", "group", "zero"), FORMS)
def test_layers_and_embeddings_are_those_of_panels(
    bits: int, group: int, zero: bool, x_bits: int
) -> None:
    N, K = 21, 300
    panels = packed(N, K, bits, group, zero, torch.float32)
    made, x, ids = to_rows(panels, N, K, bits, group), seeded(2, 3, K), torch.tensor([[3, 20]])
    args = (None, None, N, bits, group, x_bits)
    wanted = reference.linear_int(x.view(6, K), panels, *args)
    sizes = {"bits": bits, "group": group}
    found = linear_int(x, made, out_features=N, x_bits=x_bits, **sizes)  # type: ignore[arg-type]
    assert torch.equal(found.view(6, N), wanted)
    for dtype in FLOATS:
        one, two = (
            embedding_int(ids, w, in_features=K, dtype=dtype, rows=N, **sizes)  # type: ignore[arg-type]
            for w in (panels, made)
        )
        assert torch.equal(one, two)
    with pytest.raises(IndexError):
        embedding_int(torch.tensor([N]), made, in_features=K, **sizes)  # type: ignore[arg-type]


def test_gradients_flow_through_rows() -> None:
    panels = packed(21, 300, 4, 32, True, torch.float32)
    grads = []
    for weight in (panels, to_rows(panels, 21, 300, 4, 32)):
        x = seeded(3, 300).requires_grad_()
        linear_int(x, weight, out_features=21, bits=4, group=32).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])  # type: ignore[arg-type]


def test_compiled_and_fake_layers_take_rows() -> None:
    weight = to_rows(packed(21, 300, 8, 0, False, torch.float32), 21, 300, 8, 0)
    with torch.device("meta"):
        made = Packed(*(x if x is None else x.to("meta") for x in weight))  # type: ignore[arg-type]
        found = torch.ops.lezero.linear_int(torch.empty(2, 300), *made, None, None, 21, 8, 0, 16)
    assert found.shape == (2, 21)
    torch.library.opcheck(
        torch.ops.lezero.linear_int, (seeded(2, 300), *weight, None, None, 21, 8, 0, 16)
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w._replace(weight=w.weight.to(torch.int64)),
        lambda w: w._replace(weight=w.weight[:20]),
        lambda w: w._replace(weight=w.weight[:, :-1]),
        lambda w: w._replace(weight=w.weight.T.contiguous().T),
        lambda w: w._replace(scale=w.scale[:, :-1]),
        lambda w: w._replace(scale=w.scale[:, :, None]),
        lambda w: w._replace(zero=w.zero.half()),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_no_weight_in_rows_is_refused(bits: int, spoil: object) -> None:
    weight = to_rows(packed(21, 300, bits, 32, True, torch.float32), 21, 300, bits, 32)
    with pytest.raises(ConfigError, match="linear_int"):
        linear_int(seeded(2, 300), spoil(weight), out_features=21, bits=bits, group=32)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="for 21 × 200"):
        linear_int(seeded(2, 200), weight, out_features=21, bits=bits, group=32)


def test_meta_turns_shapes() -> None:
    panels = packed(21, 300, 4, 32, True, torch.float32)
    away = Packed(*(x if x is None else x.to("meta") for x in panels))  # type: ignore[arg-type]
    made = to_rows(away, 21, 300, 4, 32)
    assert made.weight.shape == to_rows(panels, 21, 300, 4, 32).weight.shape
    assert from_rows(made, 21, 300, 4, 32).weight.shape == panels.weight.shape
    assert layout.padded_inputs(made, 4) == 512
    assert not rows.takes_rows(torch.device("meta"))
    assert not rows.takes_rows(torch.device("cpu"))
    assert rows.takes_rows(torch.device("cuda"))
