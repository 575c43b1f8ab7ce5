"""AdamW kernels: exact masters, the 8-bit code, and every kernel held to the reference bit for bit.

The 8-bit kernels and masters see random, ragged, empty, non-contiguous, NaN and Inf inputs.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lezero.core.errors import ConfigError
from lezero.ops.adamw import NATIVE, eight_bit, masters, op, reference
from lezero.optim import AdamW8bit

KINDS = ("fp32", "bf16", "master", "remainder")
C = reference.coefficients(3, 1e-2, 0.9, 0.999, 1e-8, 0.1)
OPTIONS = (1e-2, 0.9, 0.999, 1e-8, 0.1)
SHAPES = [(0, 300), (5, 77), (3, 256), (4, 300), (2, 3, 129), (1, 2001)]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    """Bit for bit, but for which NaN a NaN is."""
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            assert x is y
        elif x.is_floating_point():
            nan = torch.isnan(x)
            if not torch.equal(nan, torch.isnan(y)) or not torch.equal(
                bits(x)[~nan], bits(y)[~nan]
            ):
                return False
        elif not torch.equal(x, y):
            return False
    return True


def copies(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.clone() for x in tensors]


def problem(shape: tuple[int, ...], kind: str, seed: int = 0) -> tuple[list[Tensor | None], Tensor]:
    """Weight, extra and fp32 moments of many magnitudes; the gradient."""
    make = torch.Generator().manual_seed(seed)
    wide = torch.randn(shape, generator=make)
    weight, remainder = masters.split(wide)
    param = wide.clone() if kind == "fp32" else weight
    extra = {"master": wide, "remainder": remainder}.get(kind)
    spread = torch.rand(shape, generator=make) ** 8
    m = torch.randn(shape, generator=make) * spread
    v = torch.rand(shape, generator=make) * spread**2
    return [param, extra, m, v], torch.randn(shape, generator=make) * spread


def coded(tensors: list[Tensor | None]) -> list[Tensor | None]:
    param, extra, m, v = tensors
    assert param is not None
    assert m is not None
    assert v is not None
    rows = param.shape[0]
    m_code, m_scale = eight_bit.encode(m.reshape(rows, m[:1].numel() or 300), signed=True)
    v_code, v_scale = eight_bit.encode(v.reshape(rows, v[:1].numel() or 300), signed=False)
    return [param, extra, m_code.view(m.shape), m_scale, v_code.view(v.shape), v_scale]


def run(ops: object, name: str, tensors: list[Tensor | None], grad: Tensor, kind: str) -> None:
    param, extra, *state = tensors
    more = (*state, eight_bit.tables()) if name == "adamw8bit" else state
    first = (param, param if extra is None else extra, grad)
    getattr(ops, name)(*first, *more, KINDS.index(kind), *C)


def dense_patterns(count: int = 1 << 22) -> list[Tensor]:
    """Every upper half with the lower halves that matter, and an even spread of all patterns."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    edges = (high[:, None] + low).flatten()
    spread = torch.arange(count, dtype=torch.int64) * ((1 << 32) // count) + 12345
    return [(x - (x >= 1 << 31) * (1 << 32)).to(torch.int32) for x in (edges, spread)]


def test_masters_survive_the_round_trip() -> None:
    for pattern in dense_patterns():
        value = pattern.view(torch.float32)
        weight, remainder = masters.split(value)
        back = masters.join(weight, remainder)
        nan = torch.isnan(value)
        assert torch.equal(bits(back)[~nan], pattern[~nan])
        assert torch.equal(torch.isnan(back), nan)
        assert torch.equal(torch.isnan(weight), nan)
        assert torch.equal(torch.signbit(back), torch.signbit(value))
        tie = (pattern & 0xFFFF) == 0x8000
        assert torch.equal(bits(weight)[~(tie | nan)], bits(value.bfloat16())[~(tie | nan)])
        assert (weight.float().abs() >= value.abs())[tie & ~nan].all()


def test_the_kernels_split_as_the_reference() -> None:
    """A step that changes nothing: all weights go through each kernel's split and join."""
    still = reference.Coefficients(1.0, 0.1, 0.999, 0.001, -0.0, 1.0, 1.0)
    for kernel in NATIVE.able():
        ops = NATIVE.load(kernel)
        for pattern in dense_patterns(1 << 16):
            pattern = pattern[::3]
            value = pattern.view(torch.float32)
            weight, remainder = masters.split(value)
            found = [weight.clone(), remainder.clone()]
            zeros = [torch.zeros_like(value) for _ in range(3)]
            ops.adamw(*found, *zeros, 3, *still)
            assert torch.equal(bits(found[0]), bits(weight)), kernel.name
            assert torch.equal(found[1], remainder), kernel.name


def test_a_weight_written_from_outside_counts() -> None:
    _, remainder = masters.split(torch.full((4,), -1.0000001))
    written = torch.tensor([0.0, -0.0, 3.0, float("inf")]).bfloat16()
    value = masters.join(written, torch.tensor([-5, -5, -32768, 7], dtype=torch.int16))
    assert value[:2].abs().max() < 1e-38
    assert abs(value[2] - 3) <= 2**-7
    state = [written.clone(), torch.full((4,), 9.0)]
    assert torch.equal(reference.read(*state), written.float())
    assert remainder.dtype == torch.int16


def test_autograd_hears_of_what_an_accelerator_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "triton_runs", lambda device: True)
    monkeypatch.setattr(op, "_launch", lambda problems: None)
    params = [torch.zeros(4), torch.zeros(4, 2).t()]
    for param in params:
        moments = [torch.zeros_like(param) for _ in range(3)]
        op.adamw_all("adamw_", [(param, None, *moments, torch.ones(()), 0.1, 0.9, 0.9, 1e-8, 0.0)])
    assert all(param._version for param in params)


@pytest.mark.parametrize("signed", [True, False])
def test_an_element_takes_the_middle_of_its_cell(signed: bool) -> None:
    n = torch.arange(128 if signed else 256, dtype=torch.uint8)
    values = eight_bit.values_of(n, signed)
    assert values[0] == 0
    assert values[-1] == 1
    assert (values.diff() > 0).all()
    assert torch.equal(eight_bit.numbers(values[1:], signed), n[1:])
    x = torch.rand(50_000, generator=torch.Generator().manual_seed(0)) ** 6
    found = eight_bit.numbers(x, signed)
    assert (x[found == 0] < values[1]).all()
    if not signed:  # nothing is rounded to zero
        assert found.min() == 1
    error, kept = (eight_bit.values_of(found, signed) - x).abs(), x > values[1]
    decade = found.float().log2().floor().long()
    spacing = eight_bit.tables()[0 if signed else 1][3][decade.clamp(min=0)]
    assert (error <= spacing * 0.5001)[kept].all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 700), st.booleans(), st.integers(0, 10**6))
def test_the_error_of_a_block_is_bounded(rows: int, columns: int, signed: bool, seed: int) -> None:
    """At most 7.1% (3.6% without sign) of an element in the top decade; the largest is exact."""
    make = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=make)
    values = values if signed else values.square()
    codes, scales = eight_bit.encode(values, signed)
    back = eight_bit.decode(codes, scales, signed)
    assert scales.shape == eight_bit.scales_shape(values.shape)
    for row in range(rows):
        for start in range(0, columns, 256):
            block, found = values[row, start : start + 256], back[row, start : start + 256]
            most = block.abs().max()
            assert found.abs().max() == most
            share = 0.071 if signed else 0.036
            assert (found - block).abs().max() <= 0.1 * share * most
            large = block.abs() > 1e-1 * most
            assert ((found - block).abs() <= share * block.abs())[large].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16], ids=["g32", "g16"])
def test_every_kernel_equals_the_reference(kind: str, grads: torch.dtype) -> None:
    for shape in SHAPES:
        tensors, grad = problem(shape, kind)
        grad = grad.to(grads)
        if grad.numel() > 600:
            grad.view(-1)[7], grad.view(-1)[600] = float("nan"), float("inf")
            grad.view(-1)[290], grad.view(-1)[-1] = 1e30, -3e38
        for name, state in (("adamw", tensors), ("adamw8bit", coded(tensors))):
            wanted = copies(state)
            getattr(reference, name)(wanted[0], wanted[1], grad, *wanted[2:], C)
            for kernel in NATIVE.able():
                found = copies(state)
                run(NATIVE.load(kernel), name, found, grad, kind)
                assert same(found, wanted), (shape, name, kernel.name)


def test_the_step_is_that_of_torchs_fused_kernel() -> None:
    """Whole vectors bit for bit; torch rounds the ragged end otherwise."""
    tensors, _ = problem((64, 256), "fp32")
    weight = tensors[0]
    assert weight is not None
    theirs = weight.clone().requires_grad_()
    mine = [weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)]
    lr, beta1, beta2, eps, decay = OPTIONS
    optimizer = torch.optim.AdamW([theirs], lr, (beta1, beta2), eps, decay, fused=True)
    for step in range(1, 21):
        grad = torch.randn(weight.shape)
        theirs.grad = grad.clone()
        optimizer.step()
        number = torch.tensor(float(step))
        torch.ops.lezero.adamw_(mine[0], None, grad, *mine[1:], number, *OPTIONS)
    state = optimizer.state[theirs]
    wanted = [theirs.detach(), state["exp_avg"], state["exp_avg_sq"]]
    if "avx512" in [kernel.name for kernel in NATIVE.able()]:
        assert same(list(mine), wanted)
    for found, right in zip(mine, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-6, atol=1e-7)


def test_damage_stays_in_its_block_and_is_seen() -> None:
    values = torch.ones(2, 600)
    values[0, 300], values[1, 5] = float("inf"), float("nan")
    back = eight_bit.decode(*eight_bit.encode(values, True), True)
    nan = torch.isnan(back)
    assert nan[0, 256:512].all()
    assert nan[1, :256].all()
    assert nan.sum() == 512
    tiny = torch.full((1, 64), 1e-39)
    assert not eight_bit.decode(*eight_bit.encode(tiny, False), False).any()


def test_a_finite_gradient_whose_square_overflows_harms_nothing() -> None:
    """An outlier takes no step then, as without the code, and its block trains on."""
    torch.manual_seed(0)
    for outlier in (1e19, 1e21, -1e30, 3e38):
        weight = torch.nn.Parameter(torch.randn(16, 256))
        coded, plain = (torch.nn.Parameter(weight.detach().clone()) for _ in range(2))
        optimizers = AdamW8bit([coded], lr=1e-3), torch.optim.AdamW([plain], lr=1e-3)
        for step in range(4):
            for p, optimizer in zip((coded, plain), optimizers, strict=True):
                p.grad = torch.ones(16, 256)
                if step == 1:
                    p.grad[3, 5] = outlier
                optimizer.step()
        assert coded.isfinite().all()
        moved = (coded - weight).abs()
        assert moved.max() < 0.01
        assert (coded - plain).abs()[torch.arange(16) != 3].max() < 1e-4


@pytest.mark.parametrize("name", ["adamw_", "adamw8bit_"])
def test_the_ops_take_views_and_slices_alike(name: str) -> None:
    tensors, grad = problem((12, 300), "remainder")
    given = tensors if name == "adamw_" else coded(tensors)
    step, op = torch.tensor(3.0), getattr(torch.ops.lezero, name)
    whole, parts = copies(given), copies(given)
    op(whole[0], whole[1], grad, *whole[2:], step, *OPTIONS)
    for start, stop in ((0, 5), (5, 5), (5, 6), (6, 12)):
        piece = [x[start:stop] for x in parts if x is not None]
        op(piece[0], piece[1], grad[start:stop], *piece[2:], step, *OPTIONS)
    assert same(parts, whole)
    turned = [x.t().contiguous().t() for x in copies(given) if x is not None]
    op(turned[0], turned[1], grad.t().contiguous().t(), *turned[2:], step, *OPTIONS)
    assert same(list(turned), whole)


@pytest.mark.parametrize("name", ["adamw_", "adamw8bit_"])
def test_a_forecast_for_an_accelerator_launches_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "triton_runs", lambda place: place.type == "cuda")
    monkeypatch.setattr(op, "_launch", None)
    with FakeTensorMode(), torch.device("cuda:0"):
        x, step = torch.empty(4, 300), torch.empty((), device="cpu")
        codes, scale = x.to(torch.uint8), torch.empty(eight_bit.scales_shape(x.shape))
        state = (x, x) if name == "adamw_" else (codes, scale, codes, scale)
        op.adamw_all(name, [(x, None, x, *state, step, 1e-3, 0.9, 0.99, 1e-8, 0.0)])


def test_what_does_not_fit_is_refused_before_anything_is_read() -> None:
    (param, _, m, v), grad = problem((4, 300), "fp32")
    assert param is not None
    assert m is not None
    assert v is not None
    step = torch.tensor(1.0)
    with pytest.raises(ConfigError, match=r"'exp_avg_sq' is torch.float32 \(3, 300\)"):
        torch.ops.lezero.adamw_(param, None, grad, m, v[:3], step, *OPTIONS)
    with pytest.raises(ConfigError, match=r"float64; allowed"):
        torch.ops.lezero.adamw_(param.double(), None, grad, m, v, step, *OPTIONS)
    with pytest.raises(ConfigError, match=r"gradient is torch.float32 \(4, 299\)"):
        torch.ops.lezero.adamw_(param, None, grad[:, 1:], m, v, step, *OPTIONS)
    codes, scale = eight_bit.encode(m, True)
    args = (codes, scale, codes, scale[:, :1], step)
    with pytest.raises(ConfigError, match="'exp_avg_sq_scale'"):
        torch.ops.lezero.adamw8bit_(param, None, grad, *args, *OPTIONS)
