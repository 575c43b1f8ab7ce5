import copy
import json
import math

import pytest
import torch
from torch import nn

from lezero.checkpoint import pack_optimizer, unpack_optimizer
from lezero.core.errors import FileError, OrderError
from lezero.files import read_generation, write_generation
from lezero.optim import AdamW


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)


def grouped(module, kind, turned=False, **options):
    weights = [p for n, p in module.named_parameters() if "weight" in n]
    biases = [p for n, p in module.named_parameters() if "bias" in n]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return kind(groups[::-1] if turned else groups, lr=0.01, **options)


def train(module, optimizer, count, seed):
    torch.manual_seed(seed)
    dtype = next(module.parameters()).dtype
    for _ in range(count):
        optimizer.zero_grad()
        module(torch.randn(5, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()


KINDS = [
    (torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_comes_back_bit_for_bit(tmp_path, kind, options, dtype):
    first = model(dtype=dtype)
    optimizer = grouped(first, kind, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    train(first, optimizer, 3, seed=1)
    scheduler.step()
    tensors, document = pack_optimizer(optimizer, dict(first.named_parameters()))
    path = write_generation(tmp_path, 1, tensors=tensors, documents={"optimizer": document})
    second = model(seed=5, dtype=dtype)
    second.load_state_dict(first.state_dict())
    train(first, optimizer, 3, seed=2)

    kernels = {key: options[key] for key in ("fused", "foreach") if key in options}
    again = grouped(second, kind, turned=True, **kernels)
    train(copy.deepcopy(second), again, 0, seed=0)
    read = read_generation(path)
    unpack_optimizer(
        again, dict(second.named_parameters()), read.tensors, read.documents["optimizer"]
    )
    assert {g["lr"] for g in again.param_groups} == {0.01 * 0.7}
    if "betas" in options:
        assert again.param_groups[0]["betas"] == (0.8, 0.95)
    train(second, again, 3, seed=2)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_how_a_step_is_computed_is_the_optimizers_own():
    first, second = model(), model()
    saved = grouped(first, torch.optim.AdamW, betas=(0.8, 0.95))
    train(first, saved, 2, seed=1)
    optimizer = grouped(second, AdamW)
    packed = pack_optimizer(saved, dict(first.named_parameters()))
    unpack_optimizer(optimizer, dict(second.named_parameters()), *packed)
    for group in optimizer.param_groups:
        assert (group["fused"], group["betas"]) == (True, (0.8, 0.95))
    train(second, optimizer, 1, seed=2)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_state_lies_in_memory_as_its_parameter_does(tmp_path, kind):
    """Fused kernels pair weights and moments by their place in memory."""
    options = {"fused": True, "lr": 0.1} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    pair = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    pair[1].load_state_dict(pair[0].state_dict())
    first, second = (kind(module.parameters(), **options) for module in pair)
    gradient = torch.randn(4, 3, 3, 3)
    pair[0].weight.grad = gradient.to(memory_format=torch.channels_last)
    first.step()
    pair[1].load_state_dict(pair[0].state_dict())
    tensors, document = pack_optimizer(first, dict(pair[0].named_parameters()))
    path = write_generation(tmp_path, 1, tensors=tensors, documents={"optimizer": document})
    read = read_generation(path)
    names = dict(pair[1].named_parameters())
    unpack_optimizer(second, names, read.tensors, read.documents["optimizer"])
    for module, optimizer in zip(pair, (first, second), strict=True):
        module.weight.grad = gradient.flip(0).to(memory_format=torch.channels_last)
        optimizer.step()
    assert torch.equal(pair[0].weight, pair[1].weight)


def packed(**options):
    module = model()
    optimizer = grouped(module, torch.optim.AdamW, **options)
    train(module, optimizer, 1, seed=0)
    return module, optimizer, *pack_optimizer(optimizer, dict(module.named_parameters()))


def test_names_say_what_is_meant():
    _, _, tensors, document = packed()
    assert "optimizer/0.weight/exp_avg" in tensors
    assert tensors["optimizer/2.bias/step"].shape == ()
    assert document["class"] == "AdamW"
    assert document["groups"][1]["parameters"] == ["0.bias", "2.bias"]
    json.dumps(document, allow_nan=False)


def test_a_tensor_learning_rate_stays_the_same_tensor():
    module, _, _, _ = packed()
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.25))
    tensors, document = pack_optimizer(optimizer, dict(module.named_parameters()))
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(9)
    unpack_optimizer(optimizer, dict(module.named_parameters()), tensors, document)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


def test_state_is_copied_and_old_state_goes():
    module, optimizer, tensors, document = packed()
    unpack_optimizer(optimizer, dict(module.named_parameters()), tensors, document)
    state = optimizer.state[module[0].weight]["exp_avg"]
    assert state.data_ptr() != tensors["optimizer/0.weight/exp_avg"].data_ptr()
    fresh = grouped(module, torch.optim.AdamW)
    unpack_optimizer(
        optimizer,
        dict(module.named_parameters()),
        *pack_optimizer(fresh, dict(module.named_parameters())),
    )
    assert not optimizer.state


def broken(change):
    module, optimizer, tensors, document = packed()
    before = copy.deepcopy(optimizer.state_dict())
    change(tensors, document)
    try:
        unpack_optimizer(optimizer, dict(module.named_parameters()), tensors, document)
    finally:
        after = optimizer.state_dict()
        assert before["param_groups"] == after["param_groups"]
        assert torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])


BREAKS = {
    "missing tensor": (
        lambda t, d: t.pop("optimizer/0.bias/exp_avg"),
        "state tensors .* missing: optimizer/0.bias/exp_avg",
    ),
    "extra tensor": (
        lambda t, d: t.update({"optimizer/x/exp_avg": torch.zeros(1)}),
        "not expected: optimizer/x/exp_avg",
    ),
    "missing parameter": (
        lambda t, d: d["parameters"].pop("2.bias"),
        "optimizer parameters .* missing: 2.bias",
    ),
    "extra parameter": (
        lambda t, d: d["parameters"].update(y=d["parameters"]["2.bias"]),
        "not expected: y",
    ),
    "shape": (
        lambda t, d: d["parameters"]["2.bias"].update(shape=[3]),
        r"'2.bias' has shape \(2,\); its optimizer state was saved for \(3,\)",
    ),
    "class": (lambda t, d: d.update({"class": "SGD"}), "state of SGD, this optimizer is AdamW"),
    "groups": (
        lambda t, d: d["groups"][0]["parameters"].append(d["groups"][1]["parameters"].pop()),
        "was not a group",
    ),
    "record": (lambda t, d: d.pop("groups"), "damaged"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_does_not_fit_is_named_and_changes_nothing(name):
    change, text = BREAKS[name]
    with pytest.raises(FileError, match=text):
        broken(change)


def test_an_optimizer_of_another_model_is_an_error():
    module = model()
    optimizer = torch.optim.AdamW(model().parameters())
    with pytest.raises(OrderError, match=r"group 0 .* \(number 0, shape \(8, 4\)\)"):
        pack_optimizer(optimizer, dict(module.named_parameters()))


def test_state_that_is_no_tensor_and_no_value_is_refused():
    module = model()
    optimizer = torch.optim.LBFGS(module.parameters())

    def closure():
        optimizer.zero_grad()
        loss = module(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(FileError, match="cannot be saved"):
        pack_optimizer(optimizer, dict(module.named_parameters()))


class Averaging(torch.optim.Optimizer):
    """Keeps what torch's own do not: state under text, lists of tensors, numbers without end."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "limit": math.inf, "norm": 0.0})
        self.state["common"] = {"steps": 0, "seen": [], "inner": {}}
        self.state["name"] = "averaging"

    @torch.no_grad()
    def step(self, closure=None):
        common = self.state["common"]
        common["steps"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state, norm = self.state[parameter], parameter.grad.norm()
                state.setdefault("norms", []).append(norm)
                state["best"] = min(state.get("best", -math.inf), norm.item())
                group["norm"] = group["norm"] * 0.9 + norm
                group["last"] = norm[None].double()
                common["inner"][f"{parameter.dim()}"] = parameter.grad.clone()
                common["seen"].append(norm)
                scale = torch.stack(state["norms"] + common["seen"]).mean() * common["steps"]
                parameter.sub_(group["lr"] / scale * parameter.grad)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_what_an_optimizer_keeps_besides_comes_back_in_type_and_value(tmp_path):
    first = model()
    optimizer = Averaging(first.parameters())
    train(first, optimizer, 3, seed=1)
    tensors, document = pack_optimizer(optimizer, dict(first.named_parameters()))
    path = write_generation(tmp_path, 1, tensors=tensors, documents={"optimizer": document})
    read = read_generation(path)
    second = copy.deepcopy(first)
    again = Averaging(second.parameters())
    again.state["later"] = 1
    unpack_optimizer(
        again, dict(second.named_parameters()), read.tensors, read.documents["optimizer"]
    )
    mine, other = optimizer.state_dict(), again.state_dict()
    assert same(mine["state"], other["state"])
    assert same(mine["param_groups"], other["param_groups"])
    assert "later" not in again.state
    for made, by in ((first, optimizer), (second, again)):
        train(made, by, 2, seed=2)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_a_record_without_shared_state_leaves_that_of_the_optimizer():
    module = model()
    optimizer = Averaging(module.parameters())
    names = dict(module.named_parameters())
    tensors, document = pack_optimizer(optimizer, names)
    del document["shared"]
    unpack_optimizer(optimizer, names, tensors, document)
    assert optimizer.state["common"]["steps"] == 0


ONE = {"value": 1, "dtype": "float32", "shape": []}


def nested():
    made = {"dict": {}}
    for _ in range(5000):
        made = {"dict": {"a": made}}
    return made


@pytest.mark.parametrize(
    "value",
    [
        {**ONE, "shape": [7]},
        {**ONE, "shape": "a"},
        {**ONE, "value": 300, "dtype": "int8"},
        {**ONE, "value": {"float": "inf"}, "dtype": "int8"},
        {**ONE, "value": 10**400},
        {**ONE, "value": [1, 2], "shape": [2]},
        {**ONE, "dtype": "nn"},
        {**ONE, "dtype": 3},
        {**ONE, "device": "cuda"},
        {**ONE, "device": "meta"},
        {"float": "x"},
        {},
        nested(),
    ],
    ids=range(13),
)
@pytest.mark.parametrize("where", ["option", "state", "shared"])
def test_a_damaged_value_is_a_file_error_and_changes_nothing(value, where):
    def change(tensors, document):
        if where == "option":
            document["groups"][0]["options"]["eps"] = value
        elif where == "state":
            document["parameters"]["0.bias"]["state"]["more"] = value
        else:
            document["shared"]["more"] = value

    with pytest.raises(FileError, match="record is damaged"):
        broken(change)


def test_a_saved_rate_goes_into_a_group_without_one():
    module, optimizer, tensors, document = packed()
    for group in document["groups"]:
        group["options"]["lr"] = {**ONE, "value": 0.5}
    for group in optimizer.param_groups:
        del group["lr"]
    unpack_optimizer(optimizer, dict(module.named_parameters()), tensors, document)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5] * 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(3), r"a tensor of shape \(3,\)"),
        (torch.tensor(1j), "a tensor of complex64"),
        ({1}, "of type set"),
    ],
)
def test_what_cannot_be_saved_is_said_with_what_can(value, said):
    module, optimizer, *_ = packed()
    optimizer.param_groups[0]["z"] = value
    allowed = "None, real numbers, text, real tensors of one element, and lists of these"
    with pytest.raises(FileError, match=f"option 'z' of the optimizer is {said}.* are {allowed}"):
        pack_optimizer(optimizer, dict(module.named_parameters()))
    del optimizer.param_groups[0]["z"]
    optimizer.state[module[0].weight]["z"] = [value]
    text = f"an item of state 'z' of '0.weight' of the optimizer is {said}"
    with pytest.raises(FileError, match=text):
        pack_optimizer(optimizer, dict(module.named_parameters()))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sparse_momentum_is_stored_dense_and_comes_back_sparse(tmp_path, nesterov):
    torch.manual_seed(0)
    batches = [torch.randint(0, 50, (4, 6)) for _ in range(6)]

    def started():
        module = nn.EmbeddingBag(50, 8, sparse=True)
        return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)

    def go(module, optimizer, given):
        for batch in given:
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()

    first, optimizer = started()
    go(first, optimizer, batches[:3])
    tensors, document = pack_optimizer(optimizer, dict(first.named_parameters()))
    read = read_generation(
        write_generation(tmp_path, 1, tensors=tensors, documents={"optimizer": document})
    )
    second, again = started()
    second.load_state_dict(first.state_dict())
    names = dict(second.named_parameters())
    unpack_optimizer(again, names, read.tensors, read.documents["optimizer"])
    buffer = again.state[second.weight]["momentum_buffer"]
    assert buffer.is_sparse
    assert 0 < buffer._nnz() < 50
    go(first, optimizer, batches[3:])
    go(second, again, batches[3:])
    torch.testing.assert_close(first.weight, second.weight)
