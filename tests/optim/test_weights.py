"""AdamW with masters and AdamW8bit: training, state, checkpoints, shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lezero.checkpoint.optimizer import pack_optimizer, unpack_optimizer
from lezero.core.errors import ConfigError, FileError
from lezero.optim import AdamW, AdamW8bit, weights
from tests.ranks import RankPool

MODES = ("none", "fp32", "remainder")


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(80, 120), nn.GELU(), nn.LayerNorm(120), nn.Linear(120, 70))
    return made.to(dtype)


def train(made: nn.Module, optimizer: torch.optim.Optimizer, steps: int, begin: int = 0) -> float:
    loss = torch.zeros(())
    for step in range(begin, begin + steps):
        make = torch.Generator().manual_seed(step)
        x = torch.randn(32, 80, generator=make)
        weight = next(made.parameters())
        loss = (made(x.to(weight.dtype)).float() - x[:, :70].tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
def test_both_masters_train_bit_for_bit_alike(kind: Any) -> None:
    found = []
    for mode in ("fp32", "remainder"):
        made = model()
        optimizer = kind(made, lr=1e-3, masters=mode)
        train(made, optimizer, 10)
        found.append((dict(made.state_dict()), optimizer.masters(made)))
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])
    assert all(value.dtype == torch.float32 for value in found[0][1].values())


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
@pytest.mark.parametrize("mode", ["fp32", "remainder"])
def test_a_backward_over_weights_of_before_the_step_is_an_error(kind: Any, mode: str) -> None:
    made = model()
    optimizer = kind(made, lr=1e-3, masters=mode)
    train(made, optimizer, 1)  # the first one makes the masters
    out = made(torch.randn(4, 80).bfloat16())
    out.sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.square().sum().backward()


def test_masters_are_the_weights_of_an_fp32_run() -> None:
    """Given the same gradients, the masters are what fp32 AdamW has, to the last bits."""
    half = model()
    full = copy.deepcopy(half).float()
    mine, theirs = AdamW(half, masters="remainder"), AdamW(full)
    for step in range(20):
        for number, (p, q) in enumerate(zip(half.parameters(), full.parameters(), strict=True)):
            make = torch.Generator().manual_seed(100 * step + number)
            p.grad = torch.randn(p.shape, generator=make).bfloat16()
            q.grad = p.grad.float()
        mine.step()
        theirs.step()
    for name, value in mine.masters(half).items():
        torch.testing.assert_close(value, full.get_parameter(name).detach(), rtol=1e-6, atol=1e-8)


def test_small_steps_are_lost_without_masters_only() -> None:
    for mode in MODES:
        weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        optimizer = AdamW([weight], lr=1e-4, weight_decay=0, masters=mode)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert (weight[0].item() == 1.0) == (mode == "none")
        if mode != "none":
            assert optimizer.masters({"w": weight})["w"][0] == pytest.approx(0.99, abs=1e-5)


@pytest.mark.parametrize("saved", MODES)
@pytest.mark.parametrize("loaded", MODES)
def test_state_loads_from_each_way_to_keep_masters_into_each(saved: Any, loaded: Any) -> None:
    made = model()
    optimizer = AdamW(made, masters=saved)
    train(made, optimizer, 3)
    tensors, document = pack_optimizer(optimizer, dict(made.named_parameters()))
    other = copy.deepcopy(made)
    again = AdamW(other, masters=loaded)
    if loaded == "none" != saved:
        with pytest.raises(FileError, match="masters='none' would lose"):
            unpack_optimizer(again, dict(other.named_parameters()), tensors, document)
        return
    unpack_optimizer(again, dict(other.named_parameters()), tensors, document)
    train(made, optimizer, 1, 3)
    train(other, again, 1, 3)
    if "none" not in (saved, loaded):
        assert same(optimizer.masters(made), again.masters(other))


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
@pytest.mark.parametrize("way", ["torch", "packed"])
def test_training_goes_on_bit_for_bit_after_loading(kind: Any, way: str) -> None:
    made = model()
    optimizer = kind(made, masters="remainder")
    train(made, optimizer, 3)
    other = copy.deepcopy(made)
    again = kind(other, lr=1.0, masters="remainder")
    if way == "torch":
        again.load_state_dict(optimizer.state_dict())  # of which it takes copies
    else:
        packed = pack_optimizer(optimizer, dict(made.named_parameters()))
        unpack_optimizer(again, dict(other.named_parameters()), *packed)
    train(made, optimizer, 3, 3)
    train(other, again, 3, 3)
    assert same(dict(made.state_dict()), dict(other.state_dict()))
    assert same(optimizer.masters(made), again.masters(other))


def test_state_of_another_shape_or_type_is_refused_before_it_is_used() -> None:
    made = model()
    optimizer = AdamW8bit(made, masters="remainder")
    train(made, optimizer, 1)
    names = dict(made.named_parameters())
    tensors, document = pack_optimizer(optimizer, names)
    for key, bad in (
        ("0.weight/exp_avg", torch.zeros(120, 79, dtype=torch.uint8)),
        ("0.weight/exp_avg", torch.zeros(120, 80)),
        ("0.weight/exp_avg_sq_scale", torch.zeros(120, 2)),
        ("0.weight/remainder", torch.zeros(120, 80)),
        ("0.bias/exp_avg", torch.zeros(119)),
    ):
        with pytest.raises(FileError, match=key.rpartition("/")[2]):
            unpack_optimizer(optimizer, names, {**tensors, f"optimizer/{key}": bad}, document)


def test_small_parameters_keep_fp32_state_and_the_bytes_are_told() -> None:
    made = nn.Sequential(
        *(nn.Linear(1024, 512), nn.Linear(32, 512), nn.LayerNorm(512)),
        *(nn.Linear(64, 64, bias=False), nn.Linear(63, 66, bias=False)),
    )
    optimizer = AdamW8bit(made)
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    states = [optimizer.state[p] for p in made.parameters()]
    assert [s["exp_avg"].dtype == torch.uint8 for s in states] == [True, *[False] * 5, True, False]
    held = sum(v.nbytes for k, v in states[0].items() if k != "step")
    assert held / (1024 * 512) == 2 + 8 / 256


def test_what_cannot_work_is_refused() -> None:
    made = model()
    with pytest.raises(ConfigError, match="'fp16', allowed is 'none', 'fp32', 'remainder'"):
        AdamW(made, masters="fp16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'amsgrad' is not known"):
        AdamW(made, masters="fp32", amsgrad=True)
    with pytest.raises(ConfigError, match=r"float64; allowed is float32 or bfloat16"):
        AdamW8bit(made.double())
    with pytest.raises(ConfigError, match=r"betas\[1\]: got 1.0"):
        AdamW8bit(model(), betas=(0.9, 1.0))
    for kind in (AdamW, AdamW8bit):
        with pytest.raises(ConfigError, match=r"'remainder', but every parameter is float32"):
            kind(model(torch.float32), masters="remainder")
        kind(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), masters="remainder")
    with pytest.raises(ConfigError, match="no trainable parameter"):
        AdamW8bit([])
    table = nn.Embedding(100, 80, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        AdamW8bit(table).step()


def test_hooks_run_once_and_a_closure_is_called() -> None:
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch wraps hooks round the class's step
    for mode in MODES:
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = AdamW([weight], lr=0.1, masters=mode)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))

        def closure(weight: Tensor = weight) -> float:
            weight.sum().backward()
            return 5.0

        assert optimizer.step(closure) == 5.0
        assert calls == ["before", "after"]
        assert (weight < 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_eight_bits_train_as_well_as_32(dtype: torch.dtype) -> None:
    losses = {}
    for name, make in (("32", AdamW), ("8", AdamW8bit)):
        made = model(dtype)
        masters = "none" if dtype == torch.float32 else "remainder"
        losses[name] = train(made, make(made, lr=3e-3, masters=masters), 120)
    assert losses["8"] == pytest.approx(losses["32"], rel=0.02)


def shards(world: int, kind: str, masters: str) -> dict[str, Any]:
    """Three steps on Shard(0) parameters; whole masters, and this rank's shapes of state."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    make = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(shape, generator=make).bfloat16() for shape in ((7, 700), (3, 5), (2, 4096))
    ]
    held = [nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in whole]
    named = {f"p{i}": p for i, p in enumerate(held)}
    optimizer = (AdamW if kind == "AdamW" else AdamW8bit)(held, masters=masters)  # type: ignore
    for _ in range(3):
        for parameter, value in zip(held, whole, strict=True):
            grad = torch.randn(value.shape, generator=make).bfloat16()
            parameter.grad = distribute_tensor(grad, mesh, [Shard(0)])
        optimizer.step()
    states = {
        f"{name}/{key}": value.float().full_tensor()  # Gloo moves no int16
        for name, parameter in named.items()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, DTensor)
    }
    values = {name: v.full_tensor() for name, v in optimizer.masters(named).items()}  # type: ignore
    return {key: value.clone() for key, value in (values | states).items()}


@pytest.mark.parametrize("kind", ["AdamW", "AdamW8bit"])
def test_shards_give_the_same_bits_as_one_rank(ranks: RankPool, kind: str) -> None:
    alone = ranks(1, shards, 1, kind, "remainder")[0]
    assert ("p0/exp_avg_scale" in alone) == (kind == "AdamW8bit")
    for world in (2, 4):
        for found in ranks(world, shards, world, kind, "remainder"):
            assert same(found, alone)


def cut_by_columns() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    cut = distribute_tensor(torch.ones(64, 64), init_device_mesh("cpu", (1,)), [Shard(1)])
    weight = nn.Parameter(cut)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ConfigError, match=r"cut as .*1.*; allowed is Shard\(0\)"):
        AdamW8bit([weight]).step()


def test_a_parameter_that_is_cut_by_columns_is_refused(ranks: RankPool) -> None:
    ranks(1, cut_by_columns)


def test_exact_values_change_only_what_the_optimizer_updates() -> None:
    made = nn.Linear(4, 4).bfloat16()
    optimizer = AdamW([made.weight], masters="fp32")
    before, exact = made.bias.detach().clone(), torch.full((4, 4), 1 + 2**-12)
    optimizer.take_exact(made.bias, exact[0])
    assert torch.equal(made.bias, before)
    assert made.bias not in optimizer.state
    optimizer.take_exact(made.weight, exact)
    assert torch.equal(made.weight, exact.bfloat16())
    exact.zero_()  # the caller's own still
    assert (optimizer.masters({"w": made.weight})["w"] == 1 + 2**-12).all()
    made.weight.grad = torch.zeros_like(made.weight)
    optimizer.step()  # the first, with a master before it
    assert optimizer.masters({"w": made.weight})["w"][0, 0] == pytest.approx(1 + 2**-12, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_masters_that_are_given_are_the_callers_own(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = AdamW([weight], masters="fp32")
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    first = optimizer.masters({"w": weight})["w"]
    kept = first.clone()
    first.zero_()
    assert torch.equal(optimizer.masters({"w": weight})["w"], kept)


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
def test_a_copy_goes_on_alike(kind: Any) -> None:
    made = model()
    optimizer = kind(made, lr=1e-3, masters="remainder")
    train(made, optimizer, 3)
    other, again = copy.deepcopy((made, optimizer))
    train(made, optimizer, 3, begin=3)
    train(other, again, 3, begin=3)
    assert same(dict(made.state_dict()), dict(other.state_dict()))
    assert same(optimizer.masters(made), again.masters(other))


def test_moments_of_8_bits_are_refused_where_nothing_updates_them() -> None:
    made = model()
    eight = AdamW8bit(made, masters="remainder")
    train(made, eight, 1)
    with pytest.raises(ConfigError, match="moments of 8 bits, which AdamW does not update"):
        AdamW(made, masters="remainder").load_state_dict(eight.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_moments_of_torch_become_8_bits(dtype: torch.dtype) -> None:
    made = model(dtype)
    theirs = torch.optim.AdamW(made.parameters(), lr=1e-3)
    train(made, theirs, 3)
    other = copy.deepcopy(made)
    eight = AdamW8bit(list(other.parameters()), lr=1e-3)
    eight.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(made, theirs, 1, begin=3)
    train(other, eight, 1, begin=3)
    weight, bias = other[0].weight, other[0].bias
    assert eight.state[weight]["exp_avg"].dtype == torch.uint8
    assert eight.state[weight]["exp_avg_sq_scale"].shape == (120, 1)
    assert eight.state[bias]["exp_avg"].dtype == torch.float32
    # An update is at most some lr; what 8 bits lose of the moments changes it by a tenth at most.
    allowed = 2e-4 + torch.finfo(dtype).eps * made[0].weight.abs()
    assert ((weight - made[0].weight).abs() <= allowed).float().mean() > 0.99
    train(other, eight, 1, begin=4)


@pytest.mark.parametrize("piece", [50, 250], ids=["below a row", "rows left over"])
def test_moments_are_encoded_alike_in_any_pieces(monkeypatch: Any, piece: int) -> None:
    made = model()
    theirs = torch.optim.AdamW(made.parameters(), lr=1e-3)
    train(made, theirs, 3)
    found = []
    for elements in (weights._PIECE, piece):
        monkeypatch.setattr(weights, "_PIECE", elements)
        other = copy.deepcopy(made)
        eight = AdamW8bit(list(other.parameters()), lr=1e-3)
        eight.load_state_dict(copy.deepcopy(theirs.state_dict()))
        train(other, eight, 1, begin=3)
        found.append(dict(other.state_dict()) | eight.state[other[0].weight])
    assert same(*found)


def test_the_number_of_steps_stays_on_the_host() -> None:
    """State of torch's fused kernel, whose `step` lies on the device, goes on with masters."""
    made = model()
    fused = AdamW(made)
    train(made, fused, 1)
    assert fused.param_groups[0]["fused"]
    packed = pack_optimizer(fused, dict(made.named_parameters()))
    elsewhere = model().to("meta")
    again = AdamW(elsewhere, masters="fp32")
    unpack_optimizer(again, dict(elsewhere.named_parameters()), *packed)
    for parameter in elsewhere.parameters():
        assert again.state[parameter]["exp_avg"].is_meta
        assert again.state[parameter]["step"].device.type == "cpu"


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
@pytest.mark.parametrize("masters", [None, "fp32", "remainder"], ids=["8 bits", "fp32", "16 bits"])
def test_options_that_only_torchs_kernels_know_are_refused(option: str, masters: Any) -> None:
    made = model()
    parameters = list(made.parameters())

    def optimizer(params: Any) -> Any:
        return AdamW8bit(params) if masters is None else AdamW(params, masters=masters)

    with pytest.raises(ConfigError, match=f"'{option}' of a parameter group is not known"):
        optimizer([{"params": parameters, option: True}])
    one = optimizer(parameters[:1])
    with pytest.raises(ConfigError, match=option):
        one.add_param_group({"params": parameters[1:], option: True})
    assert len(one.param_groups) == 1
    theirs = torch.optim.AdamW(parameters, **{option: True})
    train(made, theirs, 1)
    ours = optimizer(parameters)
    with pytest.raises(ConfigError, match=option):
        ours.load_state_dict(theirs.state_dict())
    assert not ours.state
    ours.param_groups[0][option] = True
    with pytest.raises(ConfigError, match=option):
        train(made, ours, 1)


def test_decay_that_is_added_to_gradients_is_refused() -> None:
    made = model()
    theirs = torch.optim.Adam(made.parameters(), weight_decay=0.5)
    with pytest.raises(ConfigError, match="weight_decay of a parameter group is added to gradien"):
        AdamW8bit(list(made.parameters())).load_state_dict(theirs.state_dict())
    theirs = torch.optim.Adam(made.parameters())
    AdamW8bit(list(made.parameters())).load_state_dict(theirs.state_dict())
