"""Attention in CUDA C++ against fp64: on an NVIDIA GPU, or on a processor in its stead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lezero.core import device
from lezero.ops.decoder import cuda_attend
from lezero.ops.linear.cuda_few import padded
from tests.ops.attend_cases import EPS, KINDS, Case, Made

NEAR = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
CASES = [
    Case(1, 8, 2, 64, 1),  # one part, of one round
    Case(2, 4, 2, 64, 8),
    Case(3, 4, 1, 64, 20, normed=True),
    Case(2, 2, 2, 64, 40, window=100),  # begins within a round
    Case(1, 4, 2, 64, 300),  # parts of 512
    Case(1, 2, 1, 64, 258, last=4096),  # the first position of which they are
    Case(1, 2, 1, 64, 100, window=700),  # the first parts are not looked at
    Case(3, 32, 2, 128, 4, window=20, normed=True),  # sixteen heads
    Case(1, 20, 2, 128, 40),  # rounds within a part
    Case(3, 10, 2, 128, 37, window=333),
]


def found(made: Made, case: Case, rows: slice = slice(None)) -> torch.Tensor:
    given = (made.qkv[rows], made.cos, made.sin, made.position_B[rows], made.table_BW[rows])
    B = len(made.qkv[rows])
    out = cuda_attend.attend(
        *(*given, made.keys, made.values),
        heads=case.H,
        window=case.window,
        norms=made.norms,
        eps=EPS,
        pad=padded(B),
    )
    return out[:, :B].transpose(0, 1).flatten(1)


@contextmanager
def nothing_unwritten() -> Iterator[None]:
    """Memory that nobody wrote is NaN. Only for our kernels: on a GPU torch's products refuse."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("cuda_place")
def test_attention(case: Case, dtype: torch.dtype) -> None:
    assert cuda_attend.suits(dtype, case.B, case.H, case.K, case.E)
    made = Made(case, dtype)
    wanted = made.wanted()
    for _ in range(2):  # the second time finds counts, and the new token, as the first left them
        with nothing_unwritten():
            out = found(made, case)
        off = made.differs(out, wanted)
        assert off["away"] < NEAR[dtype]
        assert off["keys"] < 1
        assert off["values"] < 1


@pytest.mark.usefixtures("cuda_place")
def test_small_queries_are_normed_with_eps() -> None:
    case = Case(1, 4, 2, 64, 8, normed=True)
    made = Made(case, torch.float16)
    made.qkv *= 2e-3
    assert made.differs(found(made, case), made.wanted())["away"] < NEAR[torch.float16]


@pytest.mark.usefixtures("cuda_place")
def test_a_score_far_above_those_of_other_parts() -> None:
    case = Case(1, 2, 1, 64, 40)
    made = Made(case, torch.bfloat16)
    made.qkv[0, :64] *= 5
    made.qkv[0, 128:192] = made.qkv[0, :64]  # the new key, in the last part
    assert made.differs(found(made, case), made.wanted())["away"] < NEAR[torch.bfloat16]


@pytest.mark.usefixtures("cuda_place")
def test_a_sequence_is_the_same_alone() -> None:
    case = Case(3, 8, 2, 64, 40)
    made = Made(case, torch.bfloat16)
    together = found(made, case)
    for b in range(3):
        assert torch.equal(found(made, case, slice(b, b + 1))[0], together[b])


@pytest.mark.usefixtures("cuda_place")
def test_what_is_no_number_reaches_its_own_sequence_alone() -> None:
    case = Case(3, 8, 2, 64, 20)
    made = Made(case, torch.bfloat16)
    before = found(made, case)
    made.qkv[1, 5] = torch.nan  # of a query
    after = found(made, case)
    assert after[1, :64].isnan().all()
    assert torch.equal(after[::2], before[::2])
    assert torch.equal(after[1, 64:], before[1, 64:])
    made.keys[made.places[2, 3], 1] = torch.inf  # of a past, for heads 4 to 7
    device.synchronize()  # a past is read before launches ahead have ended
    after = found(made, case)
    assert not after[2, 4 * 64 :].isfinite().any()
    assert torch.equal(after[2, : 4 * 64], before[2, : 4 * 64])
    assert torch.equal(after[0], before[0])


def test_forms() -> None:
    assert cuda_attend.suits(torch.bfloat16, 16, 32, 8, 64)
    assert cuda_attend.suits(torch.float16, 1, 16, 1, 128)
    assert not cuda_attend.suits(torch.float32, 1, 8, 8, 64)
    assert not cuda_attend.suits(torch.bfloat16, 1, 8, 8, 96)
    assert not cuda_attend.suits(torch.bfloat16, 1, 17, 1, 64)
