"""DynamicWeightGenerator: a custom layer that uses it, equality with the loop, bad input."""

import io
import itertools
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lezero as lz
from lezero.core.errors import ConfigError
from lezero.nn.dynamic_weight import mix_outputs, mix_weights

Dynamic = lz.nn.DynamicWeightGenerator


class CustomLayer(lz.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = lz.nn.Conv2d(3, 64, kernel_size=3)
        self.dynamic_op = lz.nn.DynamicWeightGenerator()

    def forward(self, x):
        x = self.conv(x)
        if self.training and x.shape[1] > 32:
            return x + self.dynamic_op(x)
        return x


def test_a_custom_layer_runs_as_written_and_trains():
    torch.manual_seed(0)
    layer = CustomLayer()
    x, target = torch.randn(4, 3, 10, 10), torch.randn(4, 64, 8, 8)
    assert layer(x).shape == (4, 64, 8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(layer.eval()(x), layer.conv(x))


SHAPES = [
    (3, 5, 7, 6),
    (2, 4, 1, 9),
    (5, 3, 2, 2),
    (1, 6, 8, 8),
    (3, 5, 11),
    (4, 1, 3),
    (3, 5, 1),
    (6, 8),
    (1, 1),
    (0, 4),
    (0, 4, 5, 5),
    (0, 3, 9),
]


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fast_path_equals_the_loop_in_fp64(shape, layout, gate):
    torch.manual_seed(1)
    module = Dynamic(layout=layout, gate=gate, kernels=3, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    if layout == "last":
        x = x.movedim(1, -1)
    fast, fast_gradients = _run(module, module.forward, x)
    loop, loop_gradients = _run(module, module.reference, x)
    assert fast.shape == x.shape
    torch.testing.assert_close(fast, loop, rtol=0, atol=1e-10)
    for got, wanted in zip(fast_gradients, loop_gradients, strict=True):
        assert (got is None) == (wanted is None) or x.numel() == 0
        if got is not None and wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def _run(module, function, x):
    x = x.detach().requires_grad_()
    y = function(x)
    torch.manual_seed(2)
    probe = torch.randn(y.shape, dtype=y.dtype)
    inputs = [x, *module.parameters()]
    return y.detach(), torch.autograd.grad((y * probe).sum(), inputs, allow_unused=True)


@pytest.mark.parametrize("shape", [(3, 5, 7, 6), (4, 3, 2, 2), (3, 5, 11)])
def test_both_fast_paths_agree_on_any_shape(shape):
    module = Dynamic(layout="first", dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    module(x)
    given = (x, module.gate_values(x), module._kernel_view(x), module.bias)
    torch.testing.assert_close(mix_weights(*given), mix_outputs(*given), rtol=0, atol=1e-10)


def test_the_formula_written_out():
    """One sample, one position, by hand: y = sum_k pi_k (W_k x + b_k)."""
    module = Dynamic(channels=3, dims=0, kernels=2, temperature=0.7, dtype=torch.float64)
    x = torch.randn(1, 3, dtype=torch.float64)
    hidden = torch.relu(module.gate_hidden_weight @ x[0] + module.gate_hidden_bias)
    scores = (module.gate_weight @ hidden + module.gate_bias) / 0.7
    pi = scores.exp() / scores.exp().sum()
    y = sum(pi[k] * (module.weight[k] @ x[0] + module.bias[k]) for k in range(2))
    torch.testing.assert_close(module(x)[0], y, rtol=0, atol=1e-6)  # the temperature is fp32


def test_weights_do_depend_on_the_input():
    torch.manual_seed(0)
    module = Dynamic(channels=8, dims=0, bias=False, temperature=0.05)
    x = torch.randn(1, 8)
    assert not torch.allclose(module(2 * x), 2 * module(x), rtol=1e-3)


def test_one_kernel_is_a_plain_convolution():
    module = Dynamic(channels=4, kernels=1)
    x = torch.randn(2, 4, 5, 5)
    weight, bias = module.weight.view(4, 4, 3, 3), module.bias[0]
    wanted = torch.nn.functional.conv2d(x, weight, bias, padding=1)
    torch.testing.assert_close(module(x), wanted)


def test_starts_with_the_variance_of_a_static_layer():
    torch.manual_seed(0)
    x = torch.randn(64, 64, 8, 8)
    static = torch.nn.Conv2d(64, 64, 3, padding=1)(x).std()
    for gate, kernels in itertools.product(("softmax", "sigmoid"), (4, 16)):
        ratio = Dynamic(channels=64, gate=gate, kernels=kernels)(x).std() / static
        assert 0.7 < ratio < 1.5


def test_channels_first_and_last_are_told_apart():
    module = Dynamic(channels=6, dims=1, layout="last")
    x_BTC = torch.randn(2, 9, 6)
    twin = Dynamic(channels=6, dims=1, layout="first")
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x_BTC), twin(x_BTC.mT).mT)
    with pytest.raises(ConfigError, match=r"6 channels and got \(2, 9, 6\).*layout='last'"):
        twin(x_BTC)
    with pytest.raises(ConfigError, match="layout='first'"):
        module(x_BTC.mT)


def test_three_dims_without_a_layout_say_how_they_were_read():
    module = Dynamic()
    with pytest.warns(UserWarning, match=r"\(B, C, T\), channels first: C=5, T=7"):
        y = module(torch.randn(2, 5, 7))
    assert y.shape == (2, 5, 7)
    assert module.channels == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.randn(3, 5, 4))
        Dynamic(layout="last")(torch.randn(2, 5, 7))
        Dynamic()(torch.randn(2, 5, 7, 7))
        Dynamic()(torch.randn(2, 5))


def test_empty_space_gives_an_empty_output():
    assert Dynamic(channels=4)(torch.randn(2, 4, 0, 5)).shape == (2, 4, 0, 5)
    assert Dynamic(channels=4, dims=1)(torch.randn(2, 4, 0)).shape == (2, 4, 0)


def test_ragged_sizes_reuse_one_module():
    module = Dynamic(channels=4)
    for shape in [(1, 4, 1, 1), (3, 4, 2, 9), (2, 4, 17, 5)]:
        torch.testing.assert_close(module(torch.ones(shape)), module.reference(torch.ones(shape)))


def test_channels_last_memory_and_views():
    module = Dynamic(channels=4).to(memory_format=torch.channels_last)
    x = torch.randn(3, 4, 6, 5)
    wanted = module(x)
    torch.testing.assert_close(module(x.to(memory_format=torch.channels_last)), wanted)
    torch.testing.assert_close(module(x.mT.contiguous().mT), wanted)


def test_nan_and_inf_stay_in_their_sample():
    module = Dynamic(channels=4)
    x = torch.randn(3, 4, 6, 6)
    wanted = module(x)
    x[1, 0, 2, 2] = float("nan")
    y = module(x)
    assert y[1].isnan().all()
    torch.testing.assert_close(y[[0, 2]], wanted[[0, 2]])


def test_bf16_autocast_is_close_and_trains():
    module = Dynamic(channels=16)
    x = torch.randn(4, 16, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    torch.testing.assert_close(y.float(), module(x), rtol=0.05, atol=0.05)
    y.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in
               module.parameters())  # fmt: skip
    half = Dynamic(channels=16).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(3, 4, 6, 6), (3, 4)])
def test_compiles_to_one_graph_and_exports_with_a_free_batch(shape):
    torch.manual_seed(0)
    module = Dynamic()
    x = torch.randn(shape)
    wanted = module(x)
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(x), wanted)
    module.temperature.fill_(3.0)
    torch.testing.assert_close(compiled(x), module(x))
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
    more = torch.randn(5, *shape[1:])
    torch.testing.assert_close(program.module()(more), module(more))


def test_meta_and_fake_tensors_carry_shapes():
    with torch.device("meta"):
        module = Dynamic()
        assert module(torch.empty(2, 8, 5, 5)).shape == (2, 8, 5, 5)
    assert module.weight.is_meta
    with FakeTensorMode():
        module = CustomLayer()
        assert module(torch.randn(2, 3, 8, 8)).shape == (2, 64, 6, 6)
        assert sum(p.numel() for p in module.parameters()) > 64 * 64 * 9 * 4


def test_train_and_eval_agree_and_reset_draws_anew():
    module = Dynamic(channels=4)
    x = torch.randn(2, 4, 5, 5)
    wanted = module.train()(x)
    assert torch.equal(module.eval()(x), wanted)
    module.temperature.fill_(9.0)
    module.reset_parameters()
    assert module.temperature == 1.0
    assert not torch.equal(module(x), wanted)


def test_state_dict_round_trip_and_a_pickled_module():
    module = Dynamic(channels=4, gate="sigmoid", bias=False)
    assert set(module.state_dict()) == {"weight", "gate_weight", "temperature"}
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(twin(x), module(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"channels": 0}, "channels=0: allowed is a whole number"),
        ({"channels": 2.5}, "channels=2.5"),
        ({"channels": True}, "channels=True"),
        ({"kernels": 0}, "kernels=0"),
        ({"kernel_size": 4}, "kernel_size=4: allowed is an odd number"),
        ({"gate": "relu"}, "gate='relu': allowed is 'softmax', 'sigmoid'"),
        ({"layout": "middle"}, "layout='middle'"),
        ({"dims": 3, "channels": 4}, "dims=3"),
        ({"dims": 1}, "dims=1 needs channels"),
        ({"temperature": 0}, "temperature=0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
    ],
)
def test_bad_arguments_name_what_is_allowed(given, message):
    with pytest.raises(ConfigError, match=message):
        Dynamic(**given)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4), r"got torch.float32 \(4,\): allowed is a floating-point tensor"),
        (torch.zeros(1, 4, 2, 2, 2), r"\(1, 4, 2, 2, 2\)"),
        (torch.zeros(2, 4, 3, 3, dtype=torch.long), "int64"),
        ([1.0], "got list"),
        (torch.zeros(2, 5, 3, 3), "sized for 4 channels"),
        (torch.zeros(2, 4, 3), "sized for 2 spatial dims"),
        (torch.zeros(2, 4, 3, 3, dtype=torch.float64), "holds torch.float32"),
    ],
)
def test_bad_inputs_are_named(x, message):
    with pytest.raises(ConfigError, match=message):
        Dynamic(channels=4)(x)


def test_no_channels_at_all():
    with pytest.raises(ConfigError, match="no channels"):
        Dynamic()(torch.zeros(2, 0, 3, 3))


def test_a_pointwise_module_takes_every_shape():
    module = Dynamic(channels=4, kernel_size=1)
    for shape in [(2, 4, 5, 5), (2, 4, 7), (2, 4)]:
        torch.testing.assert_close(module(torch.ones(shape)), module.reference(torch.ones(shape)))
