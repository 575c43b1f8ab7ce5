"""Attention for the CPU against its reference in fp64 and against torch's kernel."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lezero.core.errors import ConfigError
from lezero.ops import native as ops_native
from lezero.ops.attention import (
    FastAttention,
    attention,
    available,
    kernel_name,
    native,
    reference,
    scaled_dot_product_attention,
)
from lezero.ops.build import BuildError
from lezero.ops.native import Native

BF16 = torch.bfloat16
needs_kernel = pytest.mark.usefixtures("kernel")


@pytest.fixture(scope="module")
def kernel():
    if not kernel_name():
        pytest.skip("this processor has no AVX512-BF16")
    if not available():
        pytest.skip("the kernel cannot be built here (no C and C++ compiler)")


def case(B, H, G, M, N, E, sharp=1.0, seed=0, dtype=BF16):
    """q, k, v and the output's gradient as models have them: transposed views."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, M, H, E), (B, N, G, E), (B, N, G, E), (B, M, H, E)]
    q, k, v, g = (torch.randn(s, generator=generator).transpose(1, 2) for s in shapes)
    return (q * sharp).to(dtype), k.to(dtype), v.to(dtype), g.to(dtype)


def run(function, tensors, grad):
    """The output and the three gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def exact(q, k, v, g, causal):
    wide = [x.double() for x in (q, k, v)]
    return run(lambda *x: reference.attention(*x, causal, q.shape[3] ** -0.5), wide, g)


def ours(q, k, v, g, causal):
    return run(lambda *x: attention(*x, causal=causal), (q, k, v), g)


def torchs(q, k, v, g, causal):
    gqa = q.shape[1] != k.shape[1]
    both = lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal, enable_gqa=gqa)  # noqa: E731
    return run(both, (q, k, v), g)


def errors(found, truth):
    """Of each tensor, the norm of the difference over the norm of the output or gradient; the
    floor keeps gradients that are zero but for rounding (one key) from dividing by nothing."""
    return [
        ((x.double() - y).norm() / (y.norm() + 1e-2 * math.sqrt(y.numel()))).item()
        for x, y in zip(found, truth, strict=True)
    ]


@needs_kernel
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)]),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([32, 64, 96, 128, 256]),
    st.booleans(),
    st.sampled_from([1.0, 10.0]),
    st.integers(0, 99),
)
@example(1, (1, 1), 1, 1, 64, True, 1.0, 0)
@example(2, (4, 2), 256, 256, 64, True, 1.0, 0)
@example(1, (1, 1), 257, 257, 64, True, 1.0, 0)
@example(1, (1, 1), 300, 17, 32, True, 1.0, 0)
@example(1, (1, 1), 1, 2, 32, False, 10.0, 0)
@example(1, (1, 1), 17, 300, 32, True, 1.0, 0)
def test_output_and_gradients_equal_the_reference(B, heads, M, N, E, causal, sharp, seed):
    tensors = case(B, *heads, M, N, E, sharp, seed)
    out, grad_q, grad_k, grad_v = errors(ours(*tensors, causal), exact(*tensors, causal))
    assert max(out, grad_v) < 0.012
    # Where one key takes all the weight, the gradients of queries and keys are differences of
    # nearly equal numbers, which inputs in bf16 do not determine: torch misses them by 0.3 too.
    # test_no_error_is_above_torchs holds them there.
    assert sharp > 1.0 or max(grad_q, grad_k) < 0.012


@needs_kernel
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sharp", [1.0, 4.0, 16.0])
@pytest.mark.parametrize(
    "shape", [(2, 4, 4, 256, 256, 64), (1, 4, 2, 333, 333, 96), (1, 2, 2, 700, 700, 128)]
)
def test_no_error_is_above_torchs(shape, sharp, causal):
    tensors = case(*shape, sharp)
    truth = exact(*tensors, causal)
    mine, theirs = errors(ours(*tensors, causal), truth), errors(torchs(*tensors, causal), truth)
    for one, other in zip(mine, theirs, strict=True):
        assert one <= 1.1 * other, (mine, theirs)


@needs_kernel
def test_lse_is_that_of_the_formula():
    q, k, v, _ = case(2, 4, 2, 150, 150, 64, 3.0)
    lse = torch.ops.lezero.attention(q, k, v, True, 0.2)[1]
    plain = reference.attention_and_lse(q.double(), k.double(), v.double(), True, 0.2)[1]
    assert (lse - plain).abs().max() < 2e-5


@needs_kernel
def test_large_scores_do_not_overflow():
    tensors = case(1, 1, 1, 64, 64, 64, 3000.0)
    for error in errors(ours(*tensors, True)[:1], exact(*tensors, True)[:1]):
        assert error < 0.01
    assert all(x.isfinite().all() for x in ours(*tensors, True))


@needs_kernel
def test_strides_do_not_matter():
    plain = case(2, 4, 4, 70, 70, 64)
    truth = ours(*plain, True)
    fused = torch.stack([x.transpose(1, 2) for x in plain[:3]], 2)  # (B, T, 3, H, E)
    views = [x.transpose(1, 2) for x in fused.unbind(2)]
    odd = [torch.randn(2, 4, 70, 65).to(BF16)[..., 1:].copy_(x) for x in plain[:3]]
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in plain[:3]]
    for tensors in (views, odd, columns, [x.contiguous() for x in plain[:3]]):
        for mine, other in zip(ours(*tensors, plain[3], True), truth, strict=True):
            assert torch.equal(mine, other)
    spread = torch.ones((), dtype=BF16).expand(2, 4, 70, 64)  # what out.sum().backward() sends
    for one, other in zip(
        ours(*plain[:3], spread, True), ours(*plain[:3], spread.contiguous(), True), strict=True
    ):
        assert torch.equal(one, other)


@needs_kernel
def test_output_is_laid_out_for_the_projection():
    q, k, v, _ = case(2, 4, 4, 33, 33, 64)
    assert attention(q, k, v, causal=True).transpose(1, 2).is_contiguous()


@needs_kernel
def test_the_same_on_any_number_of_threads():
    tensors = case(3, 4, 2, 130, 130, 64)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(ours(*tensors, True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_kernel
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_infinity_are_not_hidden(bad, which):
    tensors = list(case(1, 2, 2, 150, 150, 64))
    tensors[which][0, 0, 40, 3] = bad
    out, *grads = ours(*tensors, True)
    seen = out[0, 0, 40:] if which else out[0, 0, 40]
    if which == 2 or bad != bad:
        assert not seen.isfinite().all(-1).any()
    elif which == 0:
        assert seen.isnan().all()
    assert out[0, 1].isfinite().all()
    assert out[0, 0, :32].isfinite().all()
    assert not all(x.isfinite().all() for x in grads) or which == 2
    truth = exact(*tensors, True)[0]
    assert out[0, 0, 40:].isnan().any() == truth[0, 0, 40:].isnan().any()


@needs_kernel
def test_key_of_minus_infinity_gets_no_weight():
    q, k, v, _ = case(1, 1, 1, 8, 8, 32)
    q.fill_(1.0)
    k[0, 0, 5, :] = -math.inf
    out = attention(q, k, v, causal=False)
    truth = reference.attention(q.double(), k.double(), v.double(), False, 32**-0.5)
    assert out.isfinite().all()
    assert (out - truth).abs().max() < 0.02


@needs_kernel
def test_opcheck():
    q, k, v, _ = case(1, 2, 1, 20, 20, 32)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(
        torch.ops.lezero.attention.default,
        (*leaves, True, 0.2),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_formula_runs_where_the_kernel_does_not(monkeypatch):
    monkeypatch.setattr(native.NATIVE, "_loaded", False)
    tensors = case(1, 4, 2, 20, 20, 20, dtype=torch.float64)
    for error in errors(ours(*tensors, True), exact(*tensors, True)):
        assert error < 1e-12
    tensors = case(2, 4, 2, 50, 50, 64)
    with torch.autocast("cpu", BF16):
        for error in errors(ours(*tensors, True), exact(*tensors, True)):
            assert error < 0.005
    q, k, v, _ = (x.detach().requires_grad_() for x in case(1, 2, 1, 4, 5, 8, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda *x: attention(*x, causal=True), (q, k, v))


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3, 8, 32), (2, 2, 8, 32), (2, 2, 8, 32)],
        [(2, 2, 8, 32), (2, 2, 8, 64), (2, 2, 8, 64)],
        [(2, 2, 8, 32), (2, 2, 8, 32), (2, 2, 9, 32)],
        [(2, 2, 0, 32), (2, 2, 8, 32), (2, 2, 8, 32)],
        [(8, 32), (8, 32), (8, 32)],
    ],
)
def test_bad_shapes(shapes):
    with pytest.raises(ConfigError, match="H a multiple of G"):
        attention(*(torch.zeros(s) for s in shapes), causal=True)


def test_a_failed_build_leaves_attention_to_torch(monkeypatch, caplog):
    def fail(*_):
        raise BuildError("no C compiler found")

    fresh = Native(
        "attention",
        (replace(native.NATIVE.kernels[0], needs=frozenset()),),
        registration=native.NATIVE.registration,
        otherwise=native.NATIVE.otherwise,
    )
    monkeypatch.setattr(native, "NATIVE", fresh)
    monkeypatch.setattr(ops_native, "build", fail)
    with caplog.at_level("WARNING"):
        assert not available()
    assert [r.getMessage() for r in caplog.records] == [
        "attention stays PyTorch's: no C compiler found"
    ]
    q, k, v, g = case(1, 4, 2, 20, 20, 32)
    plain = torchs(q, k, v, g, True)
    same = run(lambda *x: scaled_dot_product_attention(*x, causal=True), (q, k, v), g)
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    with FastAttention():
        assert name_of(q.requires_grad_(), k, v, is_causal=True, enable_gqa=True) != "lezero"


def name_of(*args, **kwargs):
    """Whose attention a call ran: "lezero" or torch's node."""
    node = F.scaled_dot_product_attention(*args, **kwargs).grad_fn
    name = type(node).__name__
    return "lezero" if "lezero_attention" in name else name


@needs_kernel
def test_the_mode_redirects_what_fits_and_nothing_else():
    q, k, v = (x.requires_grad_() for x in case(1, 4, 4, 20, 20, 64)[:3])
    f = [x.detach().float().requires_grad_() for x in (q, k, v)]
    mask = torch.zeros(20, 20, dtype=BF16)
    assert name_of(q, k, v, is_causal=True) != "lezero"
    with FastAttention():
        assert name_of(q, k, v, is_causal=True) == "lezero"
        assert name_of(query=q, key=k, value=v, scale=0.3) == "lezero"
        assert name_of(q, k[:, :2], v[:, :2], enable_gqa=True) == "lezero"
        assert name_of(q, k, v, mask) != "lezero"
        assert name_of(q, k, v, dropout_p=0.1) != "lezero"
        assert name_of(q, k, v, scale=-0.3) != "lezero"
        assert name_of(*(x[..., :40] for x in (q, k, v))) != "lezero"
        assert name_of(*(x[0] for x in (q, k, v))) != "lezero"
        assert name_of(*f) != "lezero"
        with torch.no_grad():
            assert F.scaled_dot_product_attention(q, k, v).grad_fn is None
        with torch.autocast("cpu", BF16):
            assert name_of(*f, is_causal=True) == "lezero"
            assert F.scaled_dot_product_attention(*f).dtype == BF16
        with torch.autocast("cpu", torch.float16):
            assert name_of(*f, is_causal=True) != "lezero"
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k[:, :3], v[:, :3])
    assert name_of(q, k, v, is_causal=True) != "lezero"


@needs_kernel
@pytest.mark.parametrize("scale", [0.02, 0.5, -3.0])
def test_any_scale_is_kept(scale):
    *tensors, grad = case(1, 4, 4, 70, 70, 64)
    asked = lambda *x: F.scaled_dot_product_attention(*x, scale=scale)  # noqa: E731
    with FastAttention():
        mine = run(asked, tensors, grad)
    direct = run(lambda *x: attention(*x, causal=False, scale=scale), tensors, grad)
    truth = run(asked, [x.double() for x in tensors], grad)
    for found in (mine, direct):
        assert max(errors(found, truth)[::3]) < 0.012  # the output and the values' gradient


@needs_kernel
def test_few_heads_on_many_cores_stay_torchs(monkeypatch):
    q, k, v = (x.requires_grad_() for x in case(1, 2, 2, 20, 20, 64)[:3])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    with FastAttention():
        assert name_of(q, k, v) != "lezero"


@needs_kernel
def test_a_llama_of_transformers_uses_it_as_it_is():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 50, (2, 40))

    def step(mode):
        model.zero_grad()
        with torch.autocast("cpu", BF16), mode(), torch.profiler.profile() as profile:
            loss = model(tokens, labels=tokens).loss
            loss.backward()
        used = sum(e.count for e in profile.key_averages() if e.key == "lezero::attention")
        return loss.item(), model.model.layers[0].self_attn.k_proj.weight.grad.clone(), used

    loss, grad, used = step(FastAttention)
    plain_loss, plain_grad, unused = step(nullcontext)
    assert (used, unused) == (2, 0)
    assert abs(loss - plain_loss) < 0.01
    assert (grad - plain_grad).norm() < 0.03 * plain_grad.norm()


@needs_kernel
def test_the_mode_trains_like_torch_in_eager_and_compiled():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(64, 3 * 64)

        def forward(self, x):
            q, k, v = (y.transpose(1, 2) for y in self.qkv(x).unflatten(-1, (3, 2, 32)).unbind(2))
            return (
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )

    def step(mode, backend=None):
        torch.manual_seed(0)
        block, x = Block(), torch.randn(2, 40, 64)
        if backend:
            block.compile(fullgraph=True, backend=backend)
        for _ in range(3):
            block.zero_grad()
            with torch.autocast("cpu", BF16), mode():
                out = block(x)
                out.float().square().sum().backward()
        return out.detach().float(), block.qkv.weight.grad

    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    plain, eager = step(nullcontext), step(FastAttention)
    compiled = step(FastAttention, count)
    step(FastAttention, count)
    assert len(graphs) == 1  # for all steps of both blocks
    assert "lezero.attention" in graphs[0].code
    direct = torch.compile(scaled_dot_product_attention, fullgraph=True, backend=count)
    direct(*(x.requires_grad_() for x in case(1, 2, 2, 9, 9, 32)[:3]), causal=True)
    torch._dynamo.reset()
    assert "lezero.attention" in graphs[1].code
    for mine, theirs in zip(eager, plain, strict=True):
        assert (mine - theirs).norm() < 0.01 * theirs.norm()
    for mine, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(mine, theirs)
