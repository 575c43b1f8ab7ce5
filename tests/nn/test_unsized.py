"""Everything that comes before the first call is one clear error, and sizing works each way."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import lezero as lz
from lezero.core.errors import OrderError

Dynamic = lz.nn.DynamicWeightGenerator
X = torch.randn(2, 4, 5, 5)


def model():
    return torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1), Dynamic())


TOO_EARLY = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters()),
    "sgd of named parameters": lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1),
    "parameter groups": lambda m: torch.optim.Adam([{"params": list(m.parameters())}]),
    "groups by number of dims": lambda m: [p for p in m.parameters() if p.ndim < 2],
    "state_dict": lambda m: m.state_dict(),
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
    "pickle": lambda m: pickle.dumps(m),
    "deepcopy": copy.deepcopy,
    "an average of the model": torch.optim.swa_utils.AveragedModel,
    "share_memory": lambda m: m.share_memory(),
    "compile": lambda m: torch.compile(m, backend="eager")(X),
    "export": lambda m: torch.export.export(m, (X,)),
    "count": lambda m: sum(p.numel() for p in m.parameters()),
    "shape": lambda m: [p.shape for p in m.parameters()],
    "norm": lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
}


@pytest.mark.parametrize("what", TOO_EARLY)
def test_too_early_names_the_module_and_the_remedy(what):
    early = model()
    with pytest.raises(OrderError) as caught:
        TOO_EARLY[what](early)
    text = str(caught.value)
    assert "DynamicWeightGenerator" in text
    assert "test_unsized.py, line" in text
    assert "call the model once" in text
    assert "channels=" in text
    early(X)
    if what not in ("compile", "export", "share_memory"):
        TOO_EARLY[what](early)  # and after the first call it works


def test_state_dict_names_the_place_in_the_model():
    with pytest.raises(OrderError, match=r"'1' \(DynamicWeightGenerator, made at"):
        model().state_dict()


def test_fullgraph_compile_carries_the_remedy():
    torch._dynamo.reset()  # forget the frames that other tests made it skip
    with pytest.raises(Exception, match=r"call the model once on a batch, give channels="):
        torch.compile(model(), backend="eager", fullgraph=True)(X)


def test_wraps_are_refused():
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrap in (torch.nn.parallel.DistributedDataParallel, fully_shard):
            with pytest.raises(OrderError, match="DynamicWeightGenerator"):
                wrap(model())
        sized = model()
        sized(X)
        torch.nn.parallel.DistributedDataParallel(sized)(X).sum().backward()
    finally:
        dist.destroy_process_group()


def test_a_fake_run_cannot_size_a_real_module():
    real = Dynamic()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(OrderError, match="shape-only"),
    ):
        real(torch.randn(2, 4, 5, 5))
    assert real(X).shape == X.shape


def test_harmless_questions_are_answered():
    early = model().double()
    assert next(early[1].parameters()).device.type == "cpu"
    early.zero_grad()
    early.requires_grad_(False).requires_grad_(True)
    early.train().eval()
    assert torch.nn.parameter.is_lazy(early[1].weight)
    assert "unsized" in repr(early)
    assert "unsized parameter of" in repr(early[1].weight)


def test_device_dtype_and_frozen_survive_until_the_first_call():
    early = Dynamic().double()
    early.requires_grad_(False)
    early(X.double())
    assert early.weight.dtype == torch.float64
    assert not any(p.requires_grad for p in early.parameters())
    moved = Dynamic().to("meta")
    assert moved(X.to("meta")).is_meta
    assert moved.temperature.is_meta


def test_first_call_in_inference_mode_leaves_trainable_parameters():
    early = Dynamic()
    with torch.inference_mode():
        early(X)
    assert not early.weight.is_inference()
    early(X).sum().backward()
    assert early.weight.grad is not None


def test_first_call_under_autocast_keeps_fp32_parameters():
    early = model()
    with torch.autocast("cpu", torch.bfloat16):
        early(X)
    assert early[1].weight.dtype == torch.float32


@pytest.mark.parametrize("shape", [(2, 6, 5, 5), (2, 6, 9), (2, 6)])
@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_dict_sizes(shape, assign):
    module, early = Dynamic(layout="first"), Dynamic(layout="first")
    x = torch.randn(shape)
    wanted = module(x)
    early.load_state_dict(module.state_dict(), assign=assign)
    assert (early.channels, early.dims) == (6, len(shape) - 2)
    torch.optim.AdamW(early.parameters())
    assert torch.equal(early(x), wanted)


def test_a_state_dict_that_does_not_fit_is_reported_as_torch_does():
    with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
        Dynamic(kernels=2).load_state_dict(Dynamic(channels=4).state_dict())
    early = Dynamic()
    with pytest.raises(RuntimeError, match=r"Missing key"):
        early.load_state_dict({})
    assert early.channels is None


def test_an_explicit_size_needs_no_first_call():
    module = Dynamic(channels=4)
    torch.optim.AdamW(module.parameters())
    copy.deepcopy(module).state_dict()
    compiled = torch.compile(Dynamic(channels=4), backend="eager", fullgraph=True)
    assert compiled(X).shape == X.shape
