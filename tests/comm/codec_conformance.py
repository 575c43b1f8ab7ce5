"""What every codec must do. Inherit `CodecConformance` beside a new codec:

class TestHalf(CodecConformance):
    name = "half"
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lezero.comm.codec import FLOATS, Codec, codec
from lezero.core.errors import ConfigError

SIZES = (1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 4099)


def values(numel: int, kind: str = "normal", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    return {
        "normal": x,
        "wide": x * torch.exp(4 * torch.randn(numel, generator=generator)),
        "equal": torch.randint(-2, 3, (numel,), generator=generator).float(),
        "small": x * 1e-30,
        "zero": x * 0,
    }[kind]


class CodecConformance:
    """Name the codec in `name`; the rest is inherited."""

    name: ClassVar[str]
    bits: ClassVar[float | None] = None
    """Payload bits an element of a long tensor, where they are a plain number."""

    def codec(self) -> Codec:
        return codec(self.name)

    def encoded(self, x: Tensor, error: Tensor | None = None) -> Tensor:
        """The payload, written over what lay there before."""
        payload = torch.full((self.codec().bytes(len(x)),), 0xA5, dtype=torch.uint8)
        self.codec().encode(x, payload, error)
        return payload

    def decoded(self, payload: Tensor, numel: int) -> Tensor:
        out = torch.full((numel,), 7.0)
        self.codec().decode(payload, out)
        return out

    def test_its_whole_name_means_the_same(self) -> None:
        one = self.codec()
        assert codec(one.name).name == one.name
        assert [codec(one.name).bytes(n) for n in SIZES] == [one.bytes(n) for n in SIZES]
        assert one.name in repr(one)

    def test_bytes_are_exact_and_grow(self) -> None:
        sizes = [self.codec().bytes(n) for n in range(600)]
        assert sizes[0] == 0
        assert sizes == sorted(sizes)
        assert all(isinstance(size, int) for size in sizes)
        if self.bits is not None:
            assert self.codec().bytes(1 << 20) * 8 == self.bits * (1 << 20)

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        st.integers(1, 3000),
        st.sampled_from(["normal", "wide", "equal", "small", "zero"]),
        st.sampled_from(FLOATS),
        st.integers(0, 99),
    )
    @example(1, "normal", torch.float32, 0)
    @example(257, "wide", torch.bfloat16, 0)
    def test_decoding_stays_within_the_bound(
        self, numel: int, kind: str, dtype: torch.dtype, seed: int
    ) -> None:
        x = values(numel, kind, seed).to(dtype)
        x = torch.where(x.isfinite(), x, 0)
        missed = (self.decoded(self.encoded(x), numel).double() - x.double()).abs()
        bound = self.codec().bound(x.float()).double()
        assert (missed <= bound).all(), (missed - bound).max()

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        st.integers(1, 3000), st.integers(0, 99), st.sampled_from([torch.float32, torch.bfloat16])
    )
    def test_error_feedback_loses_nothing(self, numel: int, seed: int, dtype: torch.dtype) -> None:
        x, before = values(numel, "normal", seed).to(dtype), 0.3 * values(numel, "normal", seed + 1)
        error = before.clone()
        payload = self.encoded(x, error)
        total = x.float() + before
        found = self.decoded(payload, numel) + error
        scale = torch.maximum(total.abs(), error.abs())
        assert ((found - total).abs() <= 2**-23 * scale).all()
        assert torch.equal(payload, self.encoded(total)), "the error is added first, in fp32"

    def test_error_in_bf16_is_the_error_rounded(self) -> None:
        x, wide = values(777), 0.25 * torch.ones(777)
        narrow = wide.bfloat16()
        assert torch.equal(self.encoded(x, wide), self.encoded(x, narrow))
        assert torch.equal(wide.bfloat16(), narrow)

    @pytest.mark.parametrize("numel", SIZES)
    def test_ragged_sizes_and_any_place_in_memory(self, numel: int) -> None:
        x = values(numel)
        payload = self.encoded(x)
        size = len(payload)
        beside = torch.full((size + 8,), 0x5A, dtype=torch.uint8)
        shifted = torch.cat([torch.zeros(3), x])[3:]
        for start in (1, 2, 3, 4):
            at = beside[start : start + size]
            self.codec().encode(shifted, at)
            assert torch.equal(at, payload)
            out = torch.full((numel + 4,), 7.0)
            self.codec().decode(at, out[start : start + numel])
            assert torch.equal(out[start : start + numel], self.decoded(payload, numel))
            assert (out[:start] == 7).all()
            assert (out[start + numel :] == 7).all()
            at.fill_(0x5A)
        assert (beside == 0x5A).all()

    def test_nothing_at_all(self) -> None:
        error = torch.empty(0)
        assert len(self.encoded(torch.empty(0), error)) == 0
        assert len(self.decoded(torch.empty(0, dtype=torch.uint8), 0)) == 0

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_adding_is_one_rounding(self, dtype: torch.dtype) -> None:
        x, base = values(500), values(500, seed=1).to(dtype)
        payload = self.encoded(x)
        out = base.clone()
        self.codec().decode(payload, out, add=True)
        assert torch.equal(out, (base.float() + self.decoded(payload, 500)).to(dtype))
        self.codec().decode(payload, out)
        assert torch.equal(out, self.decoded(payload, 500).to(dtype))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("place", [0, 300, 776])
    def test_what_is_not_finite_is_seen(self, bad: float, place: int) -> None:
        x, error = values(777), torch.full((777,), 0.125)
        plain = self.decoded(self.encoded(x), 777)
        x[place] = bad
        out = self.decoded(self.encoded(x, error), 777)
        assert not out[place].isfinite() or not out[place // 4 * 4 :][:4].isfinite().all()
        assert error.isfinite().all()
        assert error[place] == 0.125
        assert plain.isfinite().all()
        far = torch.ones(777, dtype=torch.bool)
        far[max(0, place - 256) : place + 257] = False
        assert out[far].isfinite().all(), "it takes no more than its block with it"

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("where", [slice(10, 500), slice(0, 777)], ids=["many", "all"])
    def test_steps_that_are_not_finite_spoil_no_error(self, bad: float, where: slice) -> None:
        x, error = values(777), torch.full((777,), 0.125)
        x[where] = bad
        assert not self.decoded(self.encoded(x, error), 777).isfinite().all()
        assert error.isfinite().all()
        assert (error[where] == 0.125).all()
        assert self.decoded(self.encoded(values(777), error), 777).isfinite().all()
        assert error.isfinite().all()

    @pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("large", [3.4e38, -3.39e38])
    def test_the_largest_numbers_spoil_no_error(self, large: float, kept: torch.dtype) -> None:
        """What decodes to infinity leaves an error that is finite, and so does what is dropped."""
        x, error = values(2049), torch.full((2049,), 0.125, dtype=kept)
        x[[3, 300, 301, 302, 303, 2048]] = large
        self.encoded(x, error)
        assert error.isfinite().all()
        error[error.abs() > 1e30] = 0  # of what was dropped, to be sent next
        assert self.decoded(self.encoded(values(2049), error), 2049).isfinite().all()
        assert error.isfinite().all()

    def test_the_same_on_any_number_of_threads(self) -> None:
        x, before = values(300_001), torch.get_num_threads()
        try:
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(self.encoded(x))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    def test_wrong_tensors_are_named(self) -> None:
        x, one = values(64), self.codec()
        payload = torch.empty(one.bytes(64), dtype=torch.uint8)
        wrong = [
            (x.long(), payload, None),
            (x.double(), payload, None),
            (x.view(8, 8), payload, None),
            (torch.cat([x, x])[::2], payload, None),
            (x, payload[:-1], None),
            (x, payload.to(torch.int16), None),
            (x, payload, x[:-1].clone()),
            (x, payload, x.half()),
        ]
        for case in wrong:
            with pytest.raises(ConfigError, match="allowed is a contiguous"):
                one.encode(*case)
        with pytest.raises(ConfigError, match="allowed is a contiguous"):
            one.decode(payload, x.long())
        with pytest.raises(ConfigError, match="allowed is a contiguous"):
            one.decode(payload[:-1], x)

    def test_it_claims_to_be_unbiased_only_where_it_is_exact(self) -> None:
        """A codec with randomness of its own replaces this by a test of its mean."""
        if self.codec().unbiased:
            x = values(1000, "wide")
            assert torch.equal(self.decoded(self.encoded(x), 1000), x)
