"""The fused cross-entropy against its reference and torch's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lezero.core.errors import ConfigError
from lezero.ops.cross_entropy import cross_entropy_sum, reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def case(rows, vocab, dtype, seed=0, masked=0.3):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < masked] = -100
    return logits, targets


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 70), st.integers(1, 300), st.sampled_from(list(TOLERANCE)), st.integers(0, 99)
)
def test_value_and_gradient_equal_the_reference(rows, vocab, dtype, seed):
    logits, targets = case(rows, vocab, dtype, seed)
    twin = logits.detach().clone().requires_grad_()
    mine, plain = cross_entropy_sum(logits, targets), reference.cross_entropy_sum(twin, targets)
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
    (mine * 0.7).backward()
    (plain * 0.7).backward()
    assert logits.grad.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(logits.grad, twin.grad, rtol=tolerance, atol=tolerance)


def test_many_pieces_in_fp64_equal_torch():
    logits, targets = case(700, 1111, torch.float64)
    twin = logits.detach().clone().requires_grad_()
    mine = cross_entropy_sum(logits, targets)
    theirs = F.cross_entropy(twin, targets, reduction="sum")
    assert abs(mine - theirs) / abs(theirs) < 1e-13
    mine.backward()
    theirs.backward()
    assert (logits.grad - twin.grad).abs().max() < 1e-14


def test_bf16_gradient_is_nearer_to_the_truth_than_torchs():
    logits, targets = case(64, 500, torch.bfloat16)
    twin, exact = (
        logits.detach().clone().to(t).requires_grad_() for t in (torch.bfloat16, torch.float64)
    )
    cross_entropy_sum(logits, targets).backward()
    F.cross_entropy(twin.float(), targets, reduction="sum").backward()
    F.cross_entropy(exact, targets, reduction="sum").backward()
    assert (logits.grad - exact.grad).norm() <= (twin.grad - exact.grad).norm() * 1.001


def test_opcheck_and_gradcheck():
    logits, targets = case(9, 13, torch.float64)
    torch.library.opcheck(torch.ops.lezero.cross_entropy_sum.default, (logits, targets))
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sum(x, targets), (logits,))


def test_nan_and_infinite_logits_are_not_hidden():
    logits, targets = case(4, 5, torch.float32, masked=0)
    with torch.no_grad():
        logits[1, 2] = float("nan")
    assert cross_entropy_sum(logits, targets).isnan()
    with torch.no_grad():
        logits[1, 2] = float("inf")
    assert not cross_entropy_sum(logits, targets).isfinite()


def test_non_contiguous_and_all_masked():
    logits, targets = case(6, 8, torch.float32)
    wide = torch.randn(8, 6).t()
    torch.testing.assert_close(
        cross_entropy_sum(wide, targets), reference.cross_entropy_sum(wide, targets)
    )
    masked = torch.full((6,), -100)
    total = cross_entropy_sum(logits, masked)
    total.backward()
    assert total == 0
    assert logits.grad.abs().max() == 0


@pytest.mark.parametrize("bad", [8, -1, -101])
def test_bad_targets(bad):
    logits, targets = case(6, 8, torch.float32)
    targets[3] = bad
    with pytest.raises(ConfigError, match=f"targets: got target {bad}, allowed is 0 to 7"):
        cross_entropy_sum(logits, targets)
    with pytest.raises(ConfigError, match=r"allowed is \(N, V\) and \(N,\)"):
        cross_entropy_sum(logits[None], targets)


def test_a_gradient_can_be_differentiated_again():
    logits, targets = case(9, 13, torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: cross_entropy_sum(x, targets), (logits,))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_second_derivatives_equal_torchs(dtype, kind):
    logits, targets = case(40, 57, dtype)
    twin = logits.detach().double().requires_grad_()
    along = torch.randn(40, 57, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted, found = (
        torch.autograd.functional.hvp(f, x.detach(), along.to(x.dtype))[1]
        for f, x in (
            (lambda x: F.cross_entropy(x, targets, reduction="sum") ** 2, twin),
            (lambda x: cross_entropy_sum(x, targets.to(kind)) ** 2, logits),
        )
    )
    assert found.dtype == dtype
    # The square's two parts meet in the logits' dtype, whose rounding the largest of them sets.
    torch.testing.assert_close(
        found.double(),
        wanted,
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype] * float(wanted.abs().max()),
    )


def test_the_gradient_that_is_recorded_is_the_same():
    for dtype in TOLERANCE:
        logits, targets = case(20, 30, dtype)
        for changed in (targets, torch.full_like(targets, -100)):
            total = cross_entropy_sum(logits, changed)
            (plain,) = torch.autograd.grad(total, logits, retain_graph=True)
            (recorded,) = torch.autograd.grad(total, logits, create_graph=True)
            assert recorded.requires_grad
            torch.testing.assert_close(recorded, plain)


def test_third_derivatives_equal_torchs():
    logits, targets = case(3, 4, torch.float64, masked=0)

    def third(f):
        x = logits.detach().clone().requires_grad_()
        found = f(x)
        for _ in range(2):
            (found,) = torch.autograd.grad(found.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(found.sum(), x)[0]

    torch.testing.assert_close(
        third(lambda x: cross_entropy_sum(x, targets)),
        third(lambda x: F.cross_entropy(x, targets, reduction="sum")),
    )


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4, 1e6])
def test_large_logits_lose_nothing(offset):
    logits, targets = case(40, 57, torch.float32, masked=0)
    logits = (logits.detach() + offset).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    mine = cross_entropy_sum(logits, targets)
    wanted = F.cross_entropy(exact, targets, reduction="sum")
    mine.backward()
    wanted.backward()
    assert abs(mine.item() - wanted.item()) < 1e-6 * wanted.item()
    assert (logits.grad - exact.grad).norm() < 1e-6 * exact.grad.norm()
    ends = torch.tensor([[3e38, 3e38, 1.0]], requires_grad=True)
    cross_entropy_sum(ends, torch.tensor([0])).backward()
    assert ends.grad.tolist() == [[-0.5, 0.5, 0.0]]


@pytest.mark.parametrize("bad", [-1, 7])
def test_bad_targets_are_refused_below_transforms_too(bad):
    x, targets = torch.randn(3, 7), torch.tensor([bad, 2, 3])
    with pytest.raises((IndexError, RuntimeError)):
        torch.func.grad(lambda x: cross_entropy_sum(x, targets))(x)
    with pytest.raises((IndexError, RuntimeError)):
        torch.vmap(cross_entropy_sum)(x[None], targets[None])


def test_forward_mode_and_transforms_equal_torchs():
    logits, targets = case(9, 13, torch.float64)
    x, along = logits.detach(), torch.randn(9, 13, dtype=torch.float64)
    several = torch.stack([x, 2 * x])

    def derivatives(f):
        return [
            torch.func.jvp(f, (x,), (along,))[1],
            torch.func.grad(f)(x),
            torch.func.jvp(torch.func.grad(f), (x,), (along,))[1],
            torch.func.vmap(torch.func.grad(f))(several),
        ]

    mine = derivatives(lambda x: cross_entropy_sum(x, targets))
    theirs = derivatives(lambda x: F.cross_entropy(x, targets, reduction="sum"))
    for one, other in zip(mine, theirs, strict=True):
        assert other.any()
        torch.testing.assert_close(one, other)
