"""The block codecs: every kernel gives the reference's bytes; the op is known to torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.codec import BLOCKS, FORMS, decode, encode, native, payload_bytes, reference
from tests.ops.conformance import Args, OpConformance

FLOAT, HALF = torch.float32, torch.bfloat16


def sample(numel: int, kind: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    if kind == "ties":
        return torch.randint(-2, 3, (numel,), generator=generator).float()
    if kind in ("nan", "inf", "-inf") and numel:
        x[numel // 2] = float(kind)
    if kind == "largest":
        places = torch.tensor([3, 4, 5, 100, 200])
        large = torch.tensor([3.4e38, -3.38e38, 3.39e38, -3.4e38, 3.377e38])
        x[places[places < numel]] = large[places < numel]
    scale = {"zeros": 0.0, "huge": 1e38, "tiny": 1e-37, "subnormal": 1e-42, "-zeros": -0.0}
    return x * scale.get(kind, 1.0)


KINDS = ("random", "ties", "nan", "inf", "-inf", "zeros", "-zeros")
KINDS += ("huge", "largest", "tiny", "subnormal")


@pytest.mark.parametrize("form", FORMS)
class TestEncode(OpConformance):
    native = native.NATIVE
    refuses_strides = True
    form: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _form(self, form: str) -> None:
        type(self).form = form

    def cases(self) -> Iterator[tuple[str, Args]]:
        for kind in KINDS:
            for dtype, kept in ((FLOAT, None), (FLOAT, FLOAT), (HALF, HALF), (FLOAT, HALF)):
                x = sample(777, kind).to(dtype)
                quiet = kind in ("largest", "tiny", "subnormal", "zeros")
                error = None if kept is None else (x.float() * 0 if quiet else x.float() / 3)
                if error is not None:
                    error = error.nan_to_num(0.5, 0.5, 0.5).to(kept)
                yield f"{kind} {dtype} {kept}", (x, error, 64)
        for numel in (*range(1, 40), 63, 64, 65, 1023, 1025):
            yield f"ragged {numel}", (sample(numel, "random"), sample(numel, "ties"), 32)
        for block in BLOCKS:
            yield f"ragged block {block}", (sample(2500, "random"), sample(2500, "ties"), block)
        yield "empty", (torch.empty(0), torch.empty(0), 256)

    def payload(self, x: Tensor, block: int) -> Tensor:
        return torch.full((payload_bytes(self.form, len(x), block),), 0xA5, dtype=torch.uint8)

    def outputs(self, payload: Tensor, error: Tensor | None) -> tuple[Tensor, ...]:
        return (payload,) if error is None else (payload, error)

    def expected(self, x: Tensor, error: Tensor | None, block: int) -> tuple[Tensor, ...]:
        payload = self.payload(x, block)
        reference.encode(x, payload, error, self.form, block)
        return self.outputs(payload, error)

    def kernel(self, ops: Any, x: Tensor, error: Tensor | None, block: int) -> tuple[Tensor, ...]:
        payload = self.payload(x, block)
        ops.encode(x, payload, error, FORMS.index(self.form), block)
        return self.outputs(payload, error)

    def public(self, x: Tensor, error: Tensor | None, block: int) -> tuple[Tensor, ...]:
        payload = self.payload(x, block)
        encode(x, payload, error, form=self.form, block=block)
        return self.outputs(payload, error)


@pytest.mark.parametrize("form", FORMS)
class TestDecode(OpConformance):
    native = native.NATIVE
    refuses_strides = True
    form: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _form(self, form: str) -> None:
        type(self).form = form

    def encoded(self, x: Tensor, block: int) -> Tensor:
        payload = torch.empty(payload_bytes(self.form, len(x), block), dtype=torch.uint8)
        reference.encode(x, payload, None, self.form, block)
        return payload

    def cases(self) -> Iterator[tuple[str, Args]]:
        for kind in KINDS:
            for dtype in (FLOAT, HALF):
                for add in (False, True):
                    out = sample(777, "random", 1).to(dtype)
                    yield f"{kind} {dtype} {add}", (
                        self.encoded(sample(777, kind), 64), out, 64, add
                    )  # fmt: skip
        for numel in (*range(1, 40), 63, 64, 65, 1023, 1025):
            payload = self.encoded(sample(numel, "random"), 32)
            for dtype in (FLOAT, HALF):
                yield f"ragged {numel}", (payload, torch.ones(numel, dtype=dtype), 32, True)
        for block in BLOCKS:
            payload = self.encoded(sample(2500, "random"), block)
            yield f"ragged block {block}", (payload, torch.ones(2500), block, False)
        yield "empty", (torch.empty(0, dtype=torch.uint8), torch.empty(0), 256, False)

    def expected(self, payload: Tensor, out: Tensor, block: int, add: bool) -> tuple[Tensor, ...]:
        reference.decode(payload, out, self.form, block, add)
        return (out,)

    def kernel(
        self, ops: Any, payload: Tensor, out: Tensor, block: int, add: bool
    ) -> tuple[Tensor, ...]:
        ops.decode(payload, out, FORMS.index(self.form), block, add)
        return (out,)

    def public(self, payload: Tensor, out: Tensor, block: int, add: bool) -> tuple[Tensor, ...]:
        decode(payload, out, form=self.form, block=block, add=add)
        return (out,)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(FORMS),
    st.sampled_from(BLOCKS),
    st.lists(st.floats(width=32), min_size=1, max_size=100),
    st.booleans(),
)
def test_any_values_at_all(form: str, block: int, numbers: list[float], kept: bool) -> None:
    x = torch.tensor(numbers)
    suited = [native.NATIVE.load(one) for one in native.NATIVE.able()]
    wanted = torch.empty(payload_bytes(form, len(x), block), dtype=torch.uint8)
    first = torch.linspace(-1, 1, len(x)) if kept else None
    errors = [None if first is None else first.clone() for _ in range(len(suited) + 1)]
    reference.encode(x, wanted, errors[0], form, block)
    for ops, error in zip(suited, errors[1:], strict=True):
        found = torch.empty_like(wanted)
        ops.encode(x, found, error, FORMS.index(form), block)
        assert torch.equal(found, wanted)
        if error is not None:
            torch.testing.assert_close(error, errors[0], rtol=0, atol=0, equal_nan=True)
    out = torch.empty_like(x)
    reference.decode(wanted, out, form, block, False)
    if not x.isfinite().all():
        assert not out.isfinite().all()


@pytest.mark.parametrize("kernel", [one.name for one in native.NATIVE.able()])
def test_large_outputs_are_streamed_past_the_caches(kernel: str) -> None:
    (one,) = [one for one in native.NATIVE.kernels if one.name == kernel]
    ops, numel = native.NATIVE.load(one), (1 << 22) + 77
    payload = torch.randint(0, 256, (payload_bytes("int4", numel, 64),), dtype=torch.uint8)
    blocks = -(-numel // 64)
    payload[: 2 * blocks] = torch.rand(blocks).bfloat16().view(torch.uint8)
    base, wanted = torch.full((numel + 80,), 7.0), torch.empty(numel)
    reference.decode(payload, wanted, "int4", 64, False)
    for start in (0, 3):  # at a multiple of 64 bytes, and beside it
        ops.decode(payload, base[start : start + numel], FORMS.index("int4"), 64, False)
        assert torch.equal(base[start : start + numel], wanted)
        assert (base[start + numel :] == 7).all()


@pytest.mark.parametrize("form", FORMS)
def test_torch_knows_the_ops(form: str) -> None:
    x, error = torch.randn(100), torch.zeros(100)
    payload = torch.empty(payload_bytes(form, 100, 64), dtype=torch.uint8)
    tests = ("test_schema", "test_faketensor")
    check = torch.library.opcheck
    check(torch.ops.lezero.codec_encode.default, (x, payload, error, form, 64), test_utils=tests)
    check(torch.ops.lezero.codec_encode.default, (x, payload, None, form, 64), test_utils=tests)
    encode(x, payload, form=form, block=64)
    check(torch.ops.lezero.codec_decode.default, (payload, x, form, 64, True), test_utils=tests)


@pytest.mark.parametrize("kernel", native.NATIVE.able(), ids=lambda kernel: kernel.name)
def test_bits_that_damage_made_read_no_further_than_the_pairs(kernel: Any) -> None:
    payload = torch.empty(payload_bytes("2:4-bf16", 32, 32), dtype=torch.uint8)
    reference.encode(sample(32, "random"), payload, None, "2:4-bf16", 32)
    payload[:4] = 0xFF
    out, pairs = torch.empty(32), payload[4:].clone().view(HALF).float().view(8, 2)
    native.NATIVE.load(kernel).decode(payload, out, FORMS.index("2:4-bf16"), 32, False)
    assert set(out.tolist()) <= {0.0, *pairs.flatten().tolist()}
    if kernel.name == "generic":
        assert torch.equal(out.view(8, 4), torch.nn.functional.pad(pairs, (0, 2)))


@pytest.mark.parametrize("form", FORMS)
def test_the_formula_is_the_same_whatever_the_default_dtype_is(form: str) -> None:
    x = sample(1021, "random")
    wanted, found = (torch.empty(payload_bytes(form, 1021, 1024), dtype=torch.uint8) for _ in "ab")
    reference.encode(x, wanted, None, form, 1024)
    torch.set_default_dtype(torch.bfloat16)
    try:
        reference.encode(x, found, None, form, 1024)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)


def test_the_formula_runs_where_no_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    x, payload = torch.randn(100), torch.empty(100 + 4, dtype=torch.uint8)
    encode(x, payload, form="int8", block=64)
    monkeypatch.setattr(native.NATIVE, "_loaded", False)
    again, out = torch.empty_like(payload), torch.empty(100)
    encode(x, again, form="int8", block=64)
    decode(again, out, form="int8", block=64)
    assert torch.equal(again, payload)
    assert (out - x).abs().max() < 0.02


@pytest.mark.parametrize(("form", "block"), [("int7", 64), ("int8", 100)])
def test_an_unknown_form_is_named(form: str, block: int) -> None:
    with pytest.raises(ConfigError, match="forms: int8, int4, sign"):
        encode(torch.zeros(4), torch.zeros(6, dtype=torch.uint8), form=form, block=block)


def test_tensors_on_two_devices_are_refused() -> None:
    x, payload = torch.zeros(4), torch.zeros(6, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"error: it is on meta and the values are on cpu"):
        encode(x, payload, torch.zeros(4, device="meta"), form="int8", block=64)
    with pytest.raises(ConfigError, match=r"payload: it is on cpu and the values are on meta"):
        decode(payload, x.to("meta"), form="int8", block=64)
