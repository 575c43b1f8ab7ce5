"""from_pytorch: the same module, safely loaded, with its outputs checked."""

import warnings
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from lezero.core.errors import ConfigError, FileError, LeZeroError, NumericsError
from lezero.hub import from_pytorch
from lezero.nn import DynamicWeightGenerator


class Tied(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.embed = nn.Embedding(11, 8, device=device)
        self.norm = nn.LayerNorm(8, device=device)
        self.head = nn.Linear(8, 11, bias=False, device=device)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))


def trained():
    source = network()
    for p in source.parameters():
        nn.init.normal_(p)
    source(torch.randn(4, 3, 6, 6))  # moves the running statistics
    return source


X = torch.randn(2, 3, 6, 6)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def save(state, path):
    (torch.save if path.suffix in (".pt", ".pth", ".bin") else save_file)(state, path)
    return path


def test_the_module_itself_comes_back():
    module = network()
    names, ids = list(module.state_dict()), [id(p) for p in module.parameters()]
    assert from_pytorch(module) is module
    assert list(module.state_dict()) == names
    assert [id(p) for p in module.parameters()] == ids


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_loads_and_checks_the_outputs(tmp_path, suffix):
    source = trained()
    path = save(source.state_dict(), tmp_path / f"model{suffix}")
    module = network()
    ids = [id(p) for p in module.parameters()]
    assert from_pytorch(module, path, example_inputs=X) is module
    assert [id(p) for p in module.parameters()] == ids
    assert torch.equal(module.eval()(X), source.eval()(X))
    assert torch.equal(from_pytorch(network(), str(path)).eval()(X), source(X))


class CountsAndDraws(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + torch.rand(())


def test_the_check_leaves_flags_buffers_and_randomness_as_they_were(tmp_path):
    path = save(trained().append(CountsAndDraws()).state_dict(), tmp_path / "model.safetensors")
    module = network().append(CountsAndDraws())
    module[3].eval()
    flags, random_state = [m.training for m in module.modules()], torch.get_rng_state()
    from_pytorch(module, path, example_inputs=(X,))
    assert module[4].calls == 0
    assert [m.training for m in module.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in module.parameters())


def test_inputs_as_keywords_and_outputs_as_structures():
    class Two(nn.Module):
        def forward(self, a, b):
            return {"sum": a + b, "more": (a - b, None)}

    assert from_pytorch(Two(), example_inputs={"a": X, "b": X})
    assert from_pytorch(Two(), example_inputs=[X, X])


def test_outputs_are_found_in_any_structure_and_their_lack_is_told():
    @dataclass
    class Output:
        logits: object

    class Mine(UserDict):
        pass

    class Counting(nn.Linear):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return self.wrap(super().forward(x) + self.calls)

    def counting(wrap):
        module = Counting(2, 2)
        module.wrap = wrap
        return from_pytorch(module, example_inputs=torch.randn(1, 2))

    for wrap in (Output, lambda y: Output([Mine(y=y)]), lambda y: {"o": Output(y)}):
        with pytest.raises(NumericsError, match="differs from a second run"):
            counting(wrap)
    for wrap in (lambda y: float(y.sum()), lambda y: SimpleNamespace(y=y), lambda y: None):
        with pytest.raises(ConfigError, match=r"^example_inputs: the module gives a .* no tensor"):
            counting(wrap)


def test_outputs_that_do_not_repeat_are_told():
    class Drifts(nn.Module):
        calls, output = 0, torch.empty_like(X)  # which each call writes anew

        def forward(self, x):
            self.calls += 1
            return torch.mul(x, self.calls, out=self.output)

    with pytest.raises(NumericsError, match=r"output 0 .* differs from a second run"):
        from_pytorch(Drifts(), example_inputs=X)


def test_a_load_hook_that_alters_values_is_caught(tmp_path):
    class Halves(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *rest):
            state[prefix + "weight"] = state[prefix + "weight"] / 2
            super()._load_from_state_dict(state, prefix, *rest)

    path = save(nn.Linear(3, 3).state_dict(), tmp_path / "model.pt")
    with pytest.raises(NumericsError, match="functional_call on the tensors of the file"):
        from_pytorch(Halves(3, 3), path, example_inputs=torch.randn(2, 3))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_missing_from_the_file_stay_tied(tmp_path, device):
    source = Tied()
    path = tmp_path / "model.safetensors"
    save_model(source, path)
    module = from_pytorch(Tied(device), path, example_inputs=torch.arange(4)[None])
    assert module.head.weight is module.embed.weight
    assert len(list(module.parameters())) == len(list(source.parameters()))
    assert torch.equal(module(torch.arange(11)), source(torch.arange(11)))


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path):
    state = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    state["head.weight"] += 1
    path = save(state, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"'embed.weight' and 'head.weight' differ in the file"):
        from_pytorch(Tied(), path)


def test_a_module_on_meta_gets_the_tensors_in_its_own_type(tmp_path):
    source = trained()
    path = save(source.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        module = network()
    module[0].weight.requires_grad_(False)
    from_pytorch(module, path, example_inputs=X)
    path.write_bytes(b"")  # the module owns its values
    assert torch.equal(module.eval()(X), source.eval()(X))
    assert [p.requires_grad for p in module.parameters()] == [False, True, True, True]


def test_a_meta_buffer_that_no_file_holds_is_named(tmp_path):
    module = nn.Linear(3, 3, device="meta")
    module.register_buffer("angles", torch.empty(4, device="meta"), persistent=False)
    path = save(nn.Linear(3, 3).state_dict(), tmp_path / "model.pt")
    with pytest.raises(FileError, match="'angles', which would stay without values"):
        from_pytorch(module, path)
    assert module.weight.is_meta


def test_loading_sizes_a_dynamic_layer(tmp_path):
    source = DynamicWeightGenerator(channels=4)
    path = save(source.state_dict(), tmp_path / "model.safetensors")
    module = from_pytorch(DynamicWeightGenerator(), path, example_inputs=torch.randn(2, 4, 5, 5))
    assert module.channels == 4
    assert torch.equal(module.weight, source.weight)


def test_loading_sizes_lazy_layers_of_torch(tmp_path):
    def unsized():
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))

    source, x = unsized(), torch.randn(3, 8)
    source(x)
    path = save(source.state_dict(), tmp_path / "lazy.pt")
    module = from_pytorch(unsized(), path, example_inputs=x)
    assert torch.equal(module.eval()(x), source.eval()(x))
    wrong = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(5, 2))
    with pytest.raises(FileError, match=r"'2.weight' is \(2, 4\), the module's \(2, 5\)"):
        from_pytorch(wrong, path)
    assert nn.parameter.is_lazy(wrong[0].weight)
    assert from_pytorch(unsized(), example_inputs=x)[0].weight.shape == (4, 8)


def test_missing_and_left_over_keys_name_the_nearest(tmp_path):
    state = nn.Linear(3, 3).state_dict()
    state["wieght"] = state.pop("weight")
    path = save(state, tmp_path / "model.safetensors")
    module = nn.Linear(3, 3)
    before = module.bias.clone()
    with pytest.raises(FileError) as caught:
        from_pytorch(module, path)
    assert "missing in the file: 'weight' (nearest there: 'wieght')" in str(caught.value)
    assert "not in the module: 'wieght' (nearest there: 'weight')" in str(caught.value)
    assert "strict=False" in str(caught.value)
    assert torch.equal(module.bias, before)
    with pytest.warns(UserWarning, match="missing in the file: 'weight'"):
        from_pytorch(module, path, strict=False, example_inputs=torch.randn(1, 3))
    assert torch.equal(module.bias, state["bias"])


def test_a_wrappers_prefix_is_recognized(tmp_path):
    state = {f"module.{name}": t for name, t in network().state_dict().items()}
    path = save(state, tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"keys start with 'module\.', as a wrapper's do"):
        from_pytorch(network(), path, strict=False)
    path = save(nn.Linear(3, 3).state_dict(), tmp_path / "inner.pt")
    with pytest.raises(FileError, match=r"load into module\.0 instead"):
        from_pytorch(nn.Sequential(nn.Linear(3, 3)), path)


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_named_and_nothing_is_copied(tmp_path, strict):
    path = save(nn.Linear(4, 3).state_dict(), tmp_path / "model.safetensors")
    module = nn.Linear(3, 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(FileError, match=r"'weight' is \(3, 4\), the module's \(3, 3\)"):
        from_pytorch(module, path, strict=strict)
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.zeros(3, 4).to_sparse(), "a sparse_coo tensor"),
        (torch.empty(3, 4, device="meta"), "a meta tensor"),
        (torch.zeros(3, 4, dtype=torch.uint8).view(torch.bits8), "of type torch.bits8"),
    ],
)
def test_a_tensor_that_cannot_be_copied_is_named_and_nothing_is(tmp_path, weight, said):
    path = save({"bias": torch.full((3,), 7.0), "weight": weight}, tmp_path / "model.pt")
    module = nn.Linear(4, 3)
    before = module.bias.clone()
    with pytest.raises(FileError, match=f"'weight' is {said}"):
        from_pytorch(module, path)
    assert torch.equal(module.bias, before)


def test_eight_bit_floats_are_held_by_wider_ones(tmp_path):
    weight = torch.tensor([[0.5, 2.0]]).to(torch.float8_e4m3fn)
    path = save({"weight": weight}, tmp_path / "model.pt")
    module = from_pytorch(nn.Linear(2, 1, bias=False), path)
    assert module.weight.tolist() == [[0.5, 2.0]]


def test_nan_weights_are_named(tmp_path):
    state = nn.Linear(3, 3).state_dict()
    state["weight"][1, 1] = float("nan")
    path = save(state, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"'weight' \(1 of 9\)"):
        from_pytorch(nn.Linear(3, 3), path, example_inputs=torch.randn(1, 3))


class Stale(nn.Module):
    """Computes with a copy of its weight that no load reaches."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.copy = self.linear.weight.detach().clone()

    def forward(self, x):
        return x @ self.copy.T


def test_a_forward_that_does_not_use_the_loaded_weights_is_told(tmp_path):
    path = save(Stale().state_dict(), tmp_path / "model.safetensors")
    module, x = Stale(), torch.randn(2, 4)
    with pytest.warns(UserWarning, match="do not depend on the loaded weights.*made in __init__"):
        from_pytorch(module, path, example_inputs=x)
    from_pytorch(module, path, example_inputs=x)  # the second time nothing changes
    source = Stale()
    from_pytorch(source, save(source.state_dict(), tmp_path / "own.pt"), example_inputs=x)
    from_pytorch(Stale(), path)


def test_outputs_that_tell_nothing_of_the_weights_are_no_warning(tmp_path):
    class Best(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    path = save(nn.Linear(4, 4, bias=False).state_dict(), tmp_path / "model.pt")
    from_pytorch(nn.Linear(4, 4, bias=False), path, example_inputs=torch.zeros(1, 4))
    from_pytorch(Best(4, 4, bias=False), path, example_inputs=torch.randn(1, 4))


def test_a_module_that_refuses_altered_weights_is_no_warning(tmp_path):
    class Strict(nn.Linear):
        def forward(self, x):
            if not torch.equal(self.weight, torch.eye(2)):
                raise ValueError("the weight must be the identity")
            return x

    path = save({"weight": torch.eye(2)}, tmp_path / "model.pt")
    from_pytorch(Strict(2, 2, bias=False), path, example_inputs=torch.randn(1, 2))


def test_rounding_is_said_and_integers_are_no_weights(tmp_path):
    path = save(nn.Linear(3, 3).state_dict(), tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"2 tensors are rounded .* torch.float32, the module's"):
        from_pytorch(nn.Linear(3, 3).bfloat16(), path, example_inputs=torch.randn(1, 3).bfloat16())
    widened = save(nn.Linear(3, 3).bfloat16().state_dict(), tmp_path / "half.safetensors")
    assert from_pytorch(nn.Linear(3, 3), widened).weight.dtype == torch.float32
    state = {name: t.to(torch.int8) for name, t in nn.Linear(3, 3).state_dict().items()}
    path = save(state, tmp_path / "ints.safetensors")
    with pytest.raises(FileError, match=r"'\w+' is torch.int8, the module's torch.float32"):
        from_pytorch(nn.Linear(3, 3), path)


def test_a_module_that_cannot_be_copied_still_loads(tmp_path):
    import threading

    module = network()
    module.lock = threading.Lock()
    source = trained()
    path = save(source.state_dict(), tmp_path / "model.pt")
    assert torch.equal(from_pytorch(module, path).eval()(X), source.eval()(X))
    path = save({"0.weight": torch.zeros(1)}, tmp_path / "wrong.pt")
    with pytest.raises(FileError, match=r"'0.weight' is \(1,\)"):
        from_pytorch(module, path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Linear, r"got the class Linear; make one first"),
        ("model.pt", "got the path 'model.pt' as the module"),
        ({"weight": X}, "state dict"),
        (lambda x: x, "got a function; allowed is a torch.nn.Module"),
        (None, "got a NoneType"),
        (nn.DataParallel(nn.Linear(1, 1)), r"wrapped by Distributed.*wrapped\.module"),
        (torch.compile(nn.Linear(1, 1), backend="eager"), r"wrapped by torch\.compile"),
    ],
)
def test_no_plain_module_is_a_clear_type_error(given, message):
    with pytest.raises(TypeError, match=message) as caught:
        from_pytorch(given)
    assert isinstance(caught.value, LeZeroError)


@pytest.mark.parametrize("given", [nn.Linear(2, 2).state_dict(), 3])
def test_what_is_no_path_is_named(given):
    with pytest.raises(ConfigError, match=f"^state_dict_path: got a {type(given).__name__}, "):
        from_pytorch(nn.Linear(2, 2), given)


def test_a_plain_attribute_called_module_is_no_wrap():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert from_pytorch(Holder())


def test_inputs_that_a_module_changes_are_copies():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    x = torch.ones(3)
    from_pytorch(InPlace(), example_inputs=x)
    assert torch.equal(x, torch.ones(3))
