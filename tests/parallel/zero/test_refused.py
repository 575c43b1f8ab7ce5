"""What cannot be sharded or trained so: told clearly, on every rank, before anything is split."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import groups, ledger
from lezero.core.errors import ConfigError, DistributedError, OrderError
from lezero.parallel.zero import Zero, clip_grad_norm_, no_sync, probe, shard_, sharding_of
from lezero.parallel.zero.share import share
from tests.parallel.zero.models import batches, loss_of, make


def misuse():
    model = make()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OrderError, match="not sharded; apply"):
        no_sync(model).__enter__()
    shard_(model)
    assert ledger.applied(model) == ("shard_",)
    with pytest.raises(OrderError, match="this model went through shard_ already"):
        shard_(model)
    with pytest.raises(OrderError, match="its part 'inner' went through"):
        shard_(nn.ModuleDict({"inner": model}))
    with pytest.raises(OrderError, match="cannot be copied"):
        copy.deepcopy(model)
    for part in (model, model.blocks[0]):
        with pytest.raises(OrderError, match=r"nor written by torch.save: save .*full_state_dict"):
            torch.save(part, io.BytesIO())
    with no_sync(model):
        loss_of(model, next(batches(1))).backward()
    with pytest.raises(OrderError, match=r"collected under no_sync and is not reduced"):
        torch.optim.SGD(model.parameters()).step()
    loss_of(model, next(batches(1))).backward()
    with pytest.raises(OrderError, match=r"before sharding: 22 of its 22 parameters"):
        early.step()
    with pytest.raises(ConfigError, match=r"LBFGS needs whole parameters .* \(stage 2\)"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
    with pytest.raises(ConfigError, match=r"max_norm is 0"):
        clip_grad_norm_(model, 0)
    quantized = make()
    quantized.code = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"'code' is torch.int8"):
        shard_(quantized)
    quantized.code = nn.Parameter(torch.ones(3).to(torch.float8_e5m2), requires_grad=False)
    with pytest.raises(ConfigError, match=r"'code' is torch.float8_e5m2; allowed are float32"):
        shard_(quantized, Zero(stage=0))
    with pytest.raises(ConfigError, match="no parameters"):
        shard_(nn.GELU())
    with pytest.raises(ConfigError, match=r"'0.weight' of a lazy module .* run the model once"):
        shard_(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(ConfigError, match=r"'1.running_mean' of a lazy module"):
        shard_(nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False)), Zero(stage=0))
    with pytest.raises(ConfigError, match=r"product is 2"):
        shard_(make(), mesh=Mesh({"shard": 3}))
    with pytest.raises(ConfigError, match="'shard' has 2 ranks, but stage 0"):
        shard_(make(), Zero(stage=0), mesh=Mesh({"shard": 2}))
    with pytest.raises(ConfigError, match="'rows' means nothing"):
        shard_(make(), mesh=Mesh({"rows": 2}))
    with pytest.raises(ConfigError, match=r"on meta, but the model lies on cpu; .*axes, 'cpu'"):
        shard_(make(), mesh=Mesh({"shard": 2}, "meta"))
    limited = make(tied=False)
    limited.embed.max_norm = 2.0
    with pytest.raises(ConfigError, match=r"embedding 'embed' has max_norm=2.0"):
        shard_(limited)
    with pytest.raises(ConfigError, match=r"allowed with several ranks is None"):
        shard_(limited, Zero(stage=0))
    with pytest.raises(ConfigError, match=r"axes are shard and replicate; allowed is"):
        shard_(make(), mesh=Mesh({"shard": 2, "replicate": 1}))
    with pytest.raises(ConfigError, match="stage"):
        Zero(stage=4)


def over_an_accelerator():
    """The group moves only tensors of an accelerator, as NCCL's does."""
    torch.distributed.get_backend_config = lambda group=None: "cuda:nccl"
    with pytest.raises(ConfigError, match="parameters lie on cpu, but these ranks exchange"):
        shard_(make())
    model = make()
    model.register_buffer("table", torch.tensor([[0, groups.rank()], [1, 1]]).T)
    share((*model.named_parameters(), *model.named_buffers()))  # by way of the device of this rank
    return model.table.tolist()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="'1' is compiled by TorchScript"):
        shard_(nn.Sequential(nn.Linear(4, 4), scripted), Zero(stage=0))
    with pytest.raises(ConfigError, match="the model is compiled by TorchScript"):
        shard_(scripted)


def test_what_lies_where_the_group_cannot_reach(ranks):
    assert ranks(2, over_an_accelerator) == [[[0, 1], [0, 1]]] * 2


def changed_after(stage):
    """Modules that come or go after sharding, in a loop of one's own."""
    tokens = next(batches(1))

    def fresh():
        model = shard_(make(tied=False), Zero(stage=stage))
        return model, torch.optim.AdamW(model.parameters())

    def refused_forward(name):
        with pytest.raises(OrderError, match=rf"'{name}' is not sharded: its module was added"):
            loss_of(model, tokens)

    model, old = fresh()
    model.head = nn.Linear(12, 19, bias=False)
    refused_forward("head.weight")
    for optimizer in (old, torch.optim.AdamW(model.parameters())):
        with pytest.raises(OrderError, match=r"'head.weight' is not sharded"):
            optimizer.step()
    model, old = fresh()
    model.blocks.insert(1, copy.deepcopy(make().blocks[0]))  # torch calls no hook for it
    refused_forward(r"blocks.1.norm.weight")
    model, old = fresh()
    model.register_parameter("offset", nn.Parameter(torch.zeros(1), requires_grad=False))
    refused_forward("offset")
    del model.offset
    loss_of(model, tokens).backward()
    old.step()
    model.extra = nn.Linear(2, 2)  # between a backward and its step
    with pytest.raises(OrderError, match=r"'extra.weight' is not sharded"):
        old.step()
    model, old = fresh()
    last = model.blocks[2]
    model.blocks = model.blocks[:2]
    loss_of(model, tokens).backward()
    with pytest.raises(OrderError, match=r"no longer in the model: 6 of its 23, 'blocks.2.norm.w"):
        old.step()
    torch.optim.AdamW(model.parameters()).step()
    model.blocks.append(last)  # its own again
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    model.second = shard_(nn.Linear(2, 2), Zero(stage=stage))
    loss_of(model, tokens).backward()
    old.step()
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Identity())
    with pytest.raises(OrderError, match=r"'head.\S+' (was replaced after|is not sharded)"):
        loss_of(model, tokens)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_modules_that_change_after_sharding_are_told(ranks, stage):
    ranks(2, changed_after, stage)


class Around(torch.optim.Optimizer):
    """As users wrap optimizers: the groups are shared, the step is the inner one's."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = [inner]

    def step(self, closure=None):
        self.inner[0].step()


def optimizers():
    """Which of torch's can work on shards is found out, not listed."""
    model = shard_(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), Zero(stage=2))
    model(torch.ones(2, 4)).sum().backward()
    refused = {
        "Adafactor": torch.optim.Adafactor(model.parameters()),
        "Rprop": torch.optim.Rprop(model.parameters()),
        "SGD": torch.optim.SGD(model.parameters(), fused=True),
        "Muon": torch.optim.Muon([model[0].weight]),
    }
    for name, optimizer in refused.items():
        with pytest.raises(ConfigError, match=rf"{name} .* shards .*stage 2.* lz.Zero\(stage=0\)"):
            optimizer.step()
    with pytest.raises(ConfigError, match=r"0.weight': it does not work element by element"):
        probe.check(refused["Muon"])
    with pytest.raises(ConfigError, match=r"no fused step for shards here; give it fused=False"):
        probe.check(refused["SGD"])
    before = torch.random.get_rng_state()
    for kind in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD):
        kind(model.parameters(), lr=0.1).step()
    assert torch.equal(before, torch.random.get_rng_state())
    weight = sharding_of(model).local("0.weight")
    expected = weight - 0.1 * model[0].weight.grad.to_local()
    Around(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    torch.testing.assert_close(weight, expected)
    with pytest.raises(ConfigError, match=r"Rprop .* shards"):
        Around(torch.optim.Rprop(model.parameters())).step()


def test_an_optimizer_that_cannot_work_on_shards_is_refused(ranks):
    ranks(2, optimizers)


def test_misuse_is_told_on_every_rank(ranks):
    ranks(2, misuse)


def different():
    me = groups.rank()
    for key, call in {
        "zero.stage": lambda: shard_(make(), Zero(stage=1 + me)),
        "wire.codec": lambda: shard_(make(), wire=Wire(codec=("none", "int8")[me])),
    }.items():
        with pytest.raises(DistributedError, match=f"'{key}' is .* on rank 0 but .* on rank 1"):
            call()
    with pytest.raises(DistributedError, match=r"shape of .* 'embed.weight' is \[19, 12\] on"):
        shard_(make(width=12 + 4 * me))
    model = make()
    model.norm.bias.requires_grad_(not me)
    with pytest.raises(
        DistributedError, match=r"requires_grad of .* 'norm.bias' is True on rank 0"
    ):
        shard_(model)
    with pytest.raises(
        DistributedError,
        match=r"\(17 par.* 23 on rank 1\): .* 'norm.weight' on .* 'blocks.2.norm.w",
    ):
        shard_(make(blocks=2 + me, tied=False))
    with pytest.raises(
        DistributedError, match=r"first name of .* 'head.weight' is embed.weight on rank 0 but head"
    ):
        shard_(make(tied=not me))
    for size, dtype, told in (
        (3 + me, torch.float32, r"shape of buffer 'table' is \[3\] on rank 0 but \[4\]"),
        (3, (torch.int64, torch.int32)[me], r"dtype of buffer 'table' is torch.int64 on rank 0"),
        (None if me else 3, torch.float32, r"buffer 'table' on rank 0 is nothing on rank 1"),
    ):
        model = make()
        model.register_buffer("table", None if size is None else torch.ones(size, dtype=dtype))
        with pytest.raises(DistributedError, match=told):
            shard_(model)
    broken = make()
    if me:
        broken.code = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises((ConfigError, DistributedError), match=r"'code' is torch.int8"):
        shard_(broken)


def test_ranks_that_differ_are_told_what(ranks):
    ranks(2, different)


def refused():
    for arguments, named in (
        ((make(), 3), r"config is 3; allowed is lz.Zero"),
        ((make(), 0), r"config is 0; allowed is lz.Zero"),
        ((make(), Zero(), "int8"), r"wire is 'int8'; allowed is lz.Wire"),
        ((make(), Zero(), None, {"shard": 2}), r"mesh is \{'shard': 2\}; allowed is lz.Mesh"),
        (([],), r"model is \[\]; allowed is a torch.nn.Module"),
    ):
        given = dict(zip(("model", "config", "wire", "mesh"), arguments, strict=False))
        with pytest.raises(ConfigError, match=named):
            shard_(**given)
    for stage in (1, 3):
        with pytest.raises(ConfigError, match=r"' computes in torch.float16.*stage=0"):
            shard_(make(dtype=torch.float16), Zero(stage=stage))
    for codec in ("sign", "topk:0.1", "2:4-int8"):
        with pytest.raises(ConfigError, match=r"wire.feedback: 'worker' is not allowed"):
            shard_(make(), Zero(stage=0), wire=Wire(codec=codec, feedback="worker"))
    for stage in (0, 2):
        with pytest.raises(ConfigError, match=r"lz.shard_: .*float64, .* wire.codec='none'"):
            shard_(make(dtype=torch.float64), Zero(stage=stage), wire=Wire(codec="int8"))
    with pytest.raises(ConfigError, match=r"lz.shard_: .*float64, .* wire.gather='none'"):
        shard_(make(dtype=torch.float64), Zero(stage=2), wire=Wire(gather="int8"))
    model = make()
    with pytest.raises(ConfigError):
        shard_(model, Zero(stage=0), wire=Wire(codec="2:4-int8", feedback="worker"))
    loss_of(shard_(model), next(batches(1)))  # as it was


def test_wires_and_types_that_cannot_be_are_refused_before_anything_is_split(ranks):
    ranks(2, refused)
