"""How a batch is cut, and what a model must return."""

import threading
from collections import UserDict
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.optim import AdamW
from lezero.train.engine import Engine
from lezero.train.loss import LossSum, check_batches, model_loss, private, size_of, split, to_device


def test_a_cut_keeps_every_sample_and_gives_tensors_without_dims_to_each():
    batch = {"x": torch.arange(7), "pair": (torch.arange(7), "text"), "scale": torch.tensor(2.0)}
    parts = split(batch, 3)
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), batch["x"])
    assert [part["scale"].item() for part in parts] == [2.0, 2.0, 2.0]
    assert [part["pair"][1] for part in parts] == ["text"] * 3


@pytest.mark.parametrize("pair", [dict, tuple])
def test_texts_and_arrays_are_cut_with_the_tensors_beside_them(pair):
    rows = [{"image": torch.full((2,), float(i)), "caption": f"text {i}"} for i in range(5)]
    whole = default_collate([row if pair is dict else tuple(row.values()) for row in rows])
    whole = whole if pair is dict else tuple(whole)
    keys = ("image", "caption") if pair is dict else (0, 1)
    for part in split(whole, 2):
        images, captions = (part[key] for key in keys)
        assert [f"text {int(image[0])}" for image in images] == list(captions)
    arrays = {"x": torch.arange(4), "own": np.arange(4), "seen": [[0, "a"], [1], [2], [3]]}
    for part in split(arrays, 2):
        assert part["x"].tolist() == part["own"].tolist() == [row[0] for row in part["seen"]]


@pytest.mark.parametrize("odd", [["a", "b", "c"], ([1], ["a"]), np.arange(3)])
def test_a_column_of_another_length_is_refused(odd):
    with pytest.raises(ConfigError, match=rf"has 4 samples, but its 'odd' has {len(odd)}, so it"):
        split({"x": torch.ones(4), "odd": odd}, 2)
    assert split({"x": torch.ones(4), "odd": odd}, 1)[0]["odd"] is odd


@pytest.mark.parametrize(
    "settings", [(224, 224), (0.5, True), torch.Size([4, 3, 1, 1]), ("a",), ("mean", 224, b"")]
)
def test_a_tuple_of_settings_goes_whole_into_each(settings):
    x = torch.ones(4)
    assert [part["own"] for part in split({"x": x, "own": settings}, 2)] == [settings] * 2
    assert [part[1] for part in split((x, settings), 2)] == [settings] * 2
    assert split({"x": x, "own": [settings] * 4}, 2)[1]["own"] == [settings] * 2


@pytest.mark.parametrize("column", [("a", "b", 3, "d"), (7, 8, 9, 10)])
def test_a_tuple_with_an_entry_for_each_sample_is_cut(column):
    parts = [part["own"] for part in split({"x": torch.ones(4), "own": column}, 2)]
    assert parts == [column[:2], column[2:]]


class Fields(UserDict):
    """A mapping with attributes, as the BatchEncoding of transformers."""

    def __getattr__(self, name):
        return self.data[name]


def test_a_mapping_keeps_its_type():
    batch = Fields(x=torch.arange(6), text="text")
    first, second = split(batch, 2)
    assert torch.equal(to_device(first, torch.device("cpu")).x, torch.arange(3))
    assert torch.equal(to_device(second, torch.device("cpu")).x, torch.arange(3, 6))
    assert torch.equal(batch.x, torch.arange(6))
    frozen = MappingProxyType({"x": torch.arange(6)})
    assert torch.equal(split(frozen, 2)[1]["x"], torch.arange(3, 6))


@pytest.mark.parametrize("rows", [4, 40])
def test_a_tensor_that_is_not_one_row_a_sample_is_refused_wherever_it_stands(rows):
    weights, x = torch.ones(rows), torch.ones(32, 16)
    with pytest.raises(ConfigError, match=rf"'class_weights' has {rows}, 'x' has 32"):
        split({"class_weights": weights, "x": x}, 2)
    with pytest.raises(ConfigError, match=rf"'x' has 32, 'class_weights' has {rows}"):
        split({"x": x, "class_weights": weights}, 2)
    with pytest.raises(ConfigError, match=rf"0 has 32, 1 has {rows}"):
        split((x, weights), 2)
    ready = [{"class_weights": weights, "x": x}] * 2
    assert split(ready, 2) is ready


def test_a_list_that_is_one_batch_is_told_how_to_be_given():
    with pytest.raises(ConfigError, match=r"a list of 2, .* call train_step\(tuple\(batch\)\)"):
        split([{"x": torch.ones(4, 2)}, {"y": torch.ones(4)}], 1)
    with pytest.raises(ConfigError, match=r"a list of 2, .* call train_step\(tuple\(batch\)\)"):
        split([torch.ones(4, 2), torch.ones(4)], 3)
    with pytest.raises(ConfigError, match=r"2 bare tensors and accumulate=2, .* train_step\(tuple"):
        split([torch.ones(4, 2), torch.ones(4)], 2)
    ready = [(torch.ones(4, 2), torch.ones(4)), (torch.ones(3, 2), torch.ones(3))]
    assert split(ready, 2) is ready


def test_a_list_of_bare_tensors_is_told_of_both_ways():
    parts = [torch.ones(4, 2), torch.ones(4, 2)]
    with pytest.raises(ConfigError, match=r"a tuple: \(x,\) .* batch\[0\] in the loss"):
        split(parts, 2)
    mixed = [{"x": torch.ones(4, 2)}, torch.ones(4, 2)]
    assert split(mixed, 2) is mixed


@pytest.mark.parametrize(
    "rest", [(), (torch.ones(4),), (["text"] * 4,), ({"y": torch.ones(4)},), (np.ones(4),)]
)
def test_without_accumulation_a_list_with_a_bare_tensor_is_one_batch(rest):
    one = [torch.ones(4, 2), *rest]
    assert split(one, 1) == [one]
    ready = [{"x": torch.ones(4, 2)}]
    assert split(ready, 1) is ready


@pytest.mark.parametrize("columns", [1, 2])
def test_what_a_loader_of_tensors_gives_is_trained_on_as_it_is_evaluated(columns):
    data = TensorDataset(*torch.randn(columns, 4, 6))
    (batch,) = DataLoader(data, batch_size=4)
    model = nn.Linear(6, 6)
    engine = Engine(
        model, AdamW(model, lr=1e-3), precision="fp32", compile="off",
        loss=lambda model, batch: (model(batch[0]) - batch[-1]).square().mean(),
    )  # fmt: skip
    evaluated = engine.evaluate([batch])
    result = engine.train_step(batch)
    assert (result.loss, result.tokens) == (pytest.approx(evaluated), 4)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "one",
    [
        (torch.ones(4, 2), torch.ones(4)),
        (torch.ones(4, 2), torch.ones(4, 3)),
        (torch.ones(4, 2), torch.ones(4, 2, dtype=torch.long)),
        (torch.ones(4, 2), ["text"] * 4),
        Pair(torch.ones(4, 2), torch.ones(4, 2)),
        [torch.ones(4, 2), torch.ones(4, dtype=torch.long)],
        [torch.ones(4, 2), ["text"] * 4],
        {"tokens": torch.ones(4, 2)},
        torch.ones(4, 2),
    ],
)
def test_one_batch_is_not_evaluated_as_several(one):
    with pytest.raises(ConfigError, match=r"evaluate: got one batch .* call evaluate\(\[batch\]\)"):
        check_batches(one)


def test_iterables_of_batches_are_evaluated():
    x, y = torch.ones(4, 2), torch.ones(4)
    for batches in ([(x, y)], ((x, y), (x, y)), [x, x], [{"x": x}], iter([x]), [[x, y]]):
        check_batches(batches)
    check_batches([torch.ones(4, 5), torch.ones(4, 3)])


def test_a_tensor_cut_into_batches_is_evaluated_and_a_stacked_one_told_of_it():
    x = torch.ones(7, 3, 2)
    for batches in (x.split(2), x.chunk(2), x.unbind(), x[:1].split(2), [*x.split(2)], (), []):
        check_batches(batches)
    with pytest.raises(ConfigError, match=r"evaluate\(x\.unbind\(\)\) for batches stacked"):
        check_batches(x)


def test_a_model_must_return_a_scalar():
    with pytest.raises(ConfigError, match="the model returned no scalar loss"):
        model_loss(nn.Linear(2, 2), torch.ones(3, 2))


def step_with(loss, compile="auto"):
    model = nn.Linear(2, 2)
    engine = Engine(model, AdamW(model, lr=1e-3), loss=loss, precision="fp32", compile=compile)
    return engine.train_step(torch.ones(3, 2))


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: None, "the loss function returned None; it must return the mean loss"),
        (lambda x: 3.5, "the loss function returned 3.5"),
        (lambda x: x, r"the loss function returned a tensor of shape \(3, 2\)"),
        (lambda x: x.mean().detach(), "the loss has no gradient"),
    ],
)
def test_a_loss_function_that_breaks_the_contract_is_told_so(returned, message, compile):
    with pytest.raises(ConfigError, match=f"^loss: {message}"):
        step_with(lambda model, batch: returned(model(batch)), compile)


def test_a_loss_of_one_number_may_have_dims():
    torch.manual_seed(0)
    plain = step_with(lambda model, batch: model(batch).mean(), "off")
    torch.manual_seed(0)
    assert step_with(lambda model, batch: model(batch).mean()[None, None], "off").loss == plain.loss


@pytest.mark.parametrize("error", [KeyError("mine"), AssertionError(), NotImplementedError()])
def test_an_error_of_the_users_own_code_comes_through_the_trial_of_forms(error):
    def loss(model, batch):
        raise error

    with pytest.raises(type(error)) as caught:
        step_with(loss)
    assert caught.value is error
    assert any(frame.name == "loss" and frame.path == Path(__file__) for frame in caught.traceback)


def test_a_candidate_that_fails_without_a_word_loses():
    def fail():
        raise NotImplementedError

    decisions = Decisions()
    candidates = {"plain": lambda: 1.0, "fast": fail}
    assert decisions.choose("topic", candidates, keep="plain") == "plain"
    assert decisions.records["topic"].candidates["fast"]["failed"] == "NotImplementedError"
    with pytest.raises(ConfigError, match="topic: no candidate works on this machine: fast"):
        decisions.choose("topic", {"fast": fail}, keep="plain")


def test_a_jagged_batch_is_cut_by_rows():
    parts = [torch.full((length, 2), float(length)) for length in (2, 3, 1, 5)]
    batch = {"x": torch.nested.as_nested_tensor(parts, layout=torch.jagged)}
    for cut, wanted in zip(split(batch, 2), (parts[:2], parts[2:]), strict=True):
        assert all(map(torch.equal, cut["x"].unbind(), wanted))


def test_a_sparse_batch_is_cut_by_rows():
    x = torch.diag(torch.arange(1.0, 5))
    for cut, wanted in zip(split({"x": x.to_sparse(), "y": x}, 2), x.split(2), strict=True):
        assert torch.equal(cut["x"].to_dense(), wanted)
    with pytest.raises(ConfigError, match=r"'x' is sparse_csr, which.*ready-made ones"):
        split({"x": x.to_sparse_csr(), "y": x}, 2)


class NoUpdate(dict):
    """As the outputs of transformers' models, which may be another model's batch."""

    def update(self, *_):
        raise TypeError("not allowed")


def test_a_mapping_that_cannot_be_updated_keeps_its_type():
    batch = NoUpdate(x=torch.arange(4))
    for made in (*split(batch, 2), to_device(batch, torch.device("cpu")), private(batch)):
        assert type(made) is NoUpdate
    assert private(batch)["x"].data_ptr() != batch["x"].data_ptr()


def test_a_private_batch_is_a_copy_that_backward_does_not_leave():
    x = torch.ones(2, requires_grad=True)
    setting = [1, 2]
    batch = {"x": x * 2, "set": (setting, np.ones(2)), "more": SimpleNamespace(y=x.detach())}
    copied = private(batch)
    copied["x"].sum().backward()
    copied["set"][0].append(3), copied["set"][1].fill(0), copied["more"].y.zero_()
    assert x.grad is None
    assert torch.equal(batch["x"], x * 2)
    assert setting == [1, 2]
    assert batch["set"][1].tolist() == [1, 1]
    assert batch["more"].y.tolist() == [1, 1]
    lock = threading.Lock()
    assert private({"lock": lock})["lock"] is lock


class Elsewhere(torch.Tensor):
    """Stands in for a tensor of MPS, which has no fp64, and meets no tensor of another device."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:
            return torch.device("mps")
        if func is torch.Tensor.cpu:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(torch.Tensor)
        if any(type(x) is torch.Tensor for x in args):
            raise RuntimeError("Expected all tensors to be on the same device")
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return out


def test_losses_are_summed_on_devices_without_fp64_and_on_others_than_the_first_parameters():
    def loss(model, x):
        return model(x).mean().as_subclass(Elsewhere)

    model = nn.Linear(2, 1)
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), 0.0), loss=loss, counted="samples",
        precision="fp32", compile="off", accumulate=2,
    )  # fmt: skip
    x = torch.randn(5, 2)
    assert engine.train_step(x).loss == pytest.approx(float(model(x).mean()), rel=1e-5)
    whole = LossSum(torch.device("mps")).value()
    assert (whole.dtype, whole.device.type) == (torch.float64, "cpu")


def test_a_packed_sequence_is_moved_as_it_moves_itself():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device({"x": [packed]}, torch.device("meta"))["x"][0]
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
    assert size_of([{"x": packed}]) == 5
    copy = private((packed,))[0]
    copy.data.zero_()
    assert packed.data.sum() == 5
