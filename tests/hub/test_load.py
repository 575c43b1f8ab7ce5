"""Numbers of a file that the module's type cannot hold."""

import warnings

import pytest
import torch
from torch import nn

from lezero.core.errors import FileError
from lezero.hub import from_pytorch


def save(state, path):
    torch.save(state, path)
    return path


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        (torch.tensor([[1e300, 1.0], [2.0, float("nan")]], dtype=torch.float64), torch.float32),
        (torch.tensor([[70000.0, 1.0], [2.0, 65504.0]]), torch.float16),
        (torch.tensor([[70000.0, 1.0], [2.0, 60000.0]]).bfloat16(), torch.float16),
        (torch.tensor([[torch.finfo(torch.float32).max, 1.0], [2.0, 3.0]]), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_finite_weights_that_overflow_are_refused(tmp_path, weight, kind, device):
    path = save({"weight": weight, "bias": weight[0].clone()}, tmp_path / "model.pt")
    module = nn.Linear(2, 2, device=device).to(kind)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    said = rf"2 tensors .* overflow .*'weight' \(1 of 4, {weight.dtype} into {kind}\), 'bias'"
    with pytest.raises(FileError, match=said) as caught:
        from_pytorch(module, path, example_inputs=torch.randn(1, 2).to(kind))
    assert f"module.to({weight.dtype})" in str(caught.value)
    for name, tensor in module.state_dict().items():
        assert tensor.is_meta == (device == "meta")
        assert tensor.is_meta or torch.equal(tensor, before[name])


def test_numbers_up_to_the_largest_and_infinite_ones_are_loaded(tmp_path):
    path = save({"weight": torch.tensor([[65504.0, 65519.0]])}, tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="rounded"):
        half = from_pytorch(nn.Linear(2, 1, bias=False).half(), path)
    assert half.weight.tolist() == [[65504.0, 65504.0]]
    path = save({"weight": torch.tensor([[float("inf"), 1.0]])}, tmp_path / "inf.pt")
    with pytest.warns(UserWarning, match=r"infinite values: 'weight' \(1 of 2\)"):
        from_pytorch(nn.Linear(2, 1, bias=False).double(), path)


@pytest.mark.parametrize(
    ("given", "kind", "rounds"),
    [
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
        (torch.float64, torch.float32, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.float32, False),
    ],
)
def test_a_loss_of_digits_or_of_range_is_told_and_nothing_else(tmp_path, given, kind, rounds):
    path = save({"weight": torch.ones(1, 2, dtype=given)}, tmp_path / "model.pt")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = from_pytorch(nn.Linear(2, 1, bias=False).to(kind), path)
    assert module.weight.dtype == kind
    assert [f"'weight' is {given}, the module's {kind}" in str(one.message) for one in told] == (
        [True] if rounds else []
    )


def test_integers_that_would_wrap_around_are_refused(tmp_path):
    module = nn.Linear(1, 1)
    module.register_buffer("index", torch.zeros(2, dtype=torch.int32))
    state = {**module.state_dict(), "index": torch.tensor([5, 2**40])}
    path = save(state, tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"'index' \(1 of 2, torch.int64 into torch.int32\)"):
        from_pytorch(module, path)
    path = save({**state, "index": torch.tensor([5, 2**30])}, tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="rounded"):
        assert from_pytorch(module, path).index.tolist() == [5, 2**30]


def with_buffer(values):
    module = nn.Linear(1, 1)
    module.register_buffer("held", values)
    return module


INTEGERS, REALS, COMPLEX = torch.tensor([5, 1]), torch.tensor([5.0, 1.0]), torch.tensor([5j, 1j])


@pytest.mark.parametrize(
    ("given", "there"),
    [
        (INTEGERS, REALS),
        (INTEGERS, COMPLEX),
        (INTEGERS.bool(), REALS),
        (INTEGERS.bool(), COMPLEX),
        (REALS, INTEGERS.byte()),
        (REALS, INTEGERS.bool()),
        (REALS, COMPLEX),
        (COMPLEX, INTEGERS),
        (COMPLEX.to(torch.complex128), INTEGERS.bool()),
        (COMPLEX, REALS),
    ],
)
def test_integers_reals_and_complex_numbers_never_become_each_other(tmp_path, given, there):
    path = save(with_buffer(given).state_dict(), tmp_path / "model.pt")
    module = with_buffer(there.clone())
    said = f"'held' is {given.dtype}, the module's {there.dtype}: .* not converted"
    with pytest.raises(FileError, match=said):
        from_pytorch(module, path)
    assert torch.equal(module.held, there)


def test_into_bool_go_zeros_and_ones_alone(tmp_path):
    path = save(with_buffer(INTEGERS).state_dict(), tmp_path / "five.pt")
    module = with_buffer(torch.zeros(2, dtype=torch.bool))
    with pytest.raises(FileError, match=r"'held' \(1 of 2, .*\(a buffer of torch.int64\)"):
        from_pytorch(module, path)
    assert module.held.tolist() == [False, False]
    path = save(with_buffer(torch.tensor([0, 1])).state_dict(), tmp_path / "ones.pt")
    with pytest.warns(UserWarning, match="rounded"):
        assert from_pytorch(module, path).held.tolist() == [False, True]


@pytest.mark.parametrize("kind", [torch.uint16, torch.uint64])
def test_bool_and_unsigned_integers_become_each_other(tmp_path, kind):
    bits = torch.tensor([True, False])
    path = save(with_buffer(bits).state_dict(), tmp_path / "bool.pt")
    assert from_pytorch(with_buffer(bits.to(kind)), path).held.tolist() == [1, 0]
    path = save(with_buffer(bits.to(kind)).state_dict(), tmp_path / "integers.pt")
    with pytest.warns(UserWarning, match="rounded"):
        assert from_pytorch(with_buffer(~bits), path).held.tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "there", "loads"),
    [
        (torch.tensor([-1, 1], dtype=torch.int8), torch.uint8, False),
        (torch.tensor([255, 1], dtype=torch.uint8), torch.int8, False),
        (torch.tensor([-1, 1]), torch.uint64, False),
        (torch.tensor([2**64 - 1, 1], dtype=torch.uint64), torch.int64, False),
        (torch.tensor([127, 1], dtype=torch.int8), torch.uint8, True),
    ],
)
def test_integers_that_would_change_their_sign_are_refused(tmp_path, value, there, loads):
    """Going there and back gives the same bits."""
    path = save(with_buffer(value).state_dict(), tmp_path / "model.pt")
    module = with_buffer(torch.zeros(2, dtype=there))
    if loads:
        with pytest.warns(UserWarning, match="rounded"):
            assert from_pytorch(module, path).held.tolist() == value.tolist()
        return
    with pytest.raises(FileError, match=rf"'held' \(1 of 2, {value.dtype} into {there}\)"):
        from_pytorch(module, path)
    assert module.held.tolist() == [0, 0]
