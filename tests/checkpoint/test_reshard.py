"""Saved with any stage and number of ranks, a generation loads with any other, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from lezero import checkpoint
from lezero.checkpoint import crew
from lezero.comm.mesh import Mesh
from lezero.core import groups
from lezero.core.errors import CorruptError, FileError, LeZeroError
from lezero.files import list_generations
from lezero.ops.adamw import masters
from lezero.optim import AdamW, AdamW8bit
from lezero.parallel.zero import Zero, shard_, sharding_of
from lezero.train import Engine

STAGES, RANKS = (0, 1, 2, 3), (1, 2, 3, 4)
KINDS = ("adamw", "fp32", "remainder", "8bit", "8bit-remainder", "torch", "momentum", "nadam")
OF_TORCH = {
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
}


class Tiny(nn.Module):
    """Rows that do not divide among ranks, fewer rows than ranks, no dims, tied ends, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(71, 64)
        self.up = nn.Linear(64, 66)
        self.down = nn.Linear(66, 64)
        self.few = nn.Parameter(torch.randn(2, 64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(64, 71, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(64))

    def forward(self, tokens):
        x = self.embed(tokens) + self.offset
        x = x + self.down(F.gelu(self.up(x))) + self.few.sum(0)
        return self.head(x) * self.scale


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def engine(kind, stage, seed, wire=None, mesh=None):
    torch.manual_seed(seed)
    wide = kind in ("adamw", "8bit", *OF_TORCH)
    model = Tiny().to(torch.float32 if wide else torch.bfloat16)
    if stage is not None:
        shard_(model, Zero(stage=stage), wire=wire, mesh=mesh)
    masters = kind.removeprefix("8bit-") if "-" in kind or kind in ("fp32", "remainder") else "none"
    build = AdamW8bit if kind.startswith("8bit") else AdamW
    if kind in OF_TORCH:
        optimizer = OF_TORCH[kind](model.parameters())
    else:
        optimizer = build(model.parameters(), lr=1e-2, masters=masters)
    return Engine(
        model, optimizer, loss=loss_of, counted="samples", compile="off", attention="torch",
        pool=False, seed=seed,
    )  # fmt: skip


def train(made, steps):
    torch.manual_seed(groups.rank())
    for _ in range(steps):
        made.train_step(torch.randint(0, 71, (2, 7)))


def whole(tensor):
    """The whole of a tensor that may be split; as bytes, since Gloo knows few types."""
    if not hasattr(tensor, "to_local") or not tensor.dim():
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()
    local, count = tensor.detach().to_local(), groups.world_size()
    each = -(-tensor.shape[0] // count)
    padded = local.new_zeros(each, *local.shape[1:])
    padded[: len(local)] = local
    every = [torch.empty_like(padded.view(torch.uint8)) for _ in range(count)]
    dist.all_gather(every, padded.view(torch.uint8))
    return torch.cat(every).view(tensor.dtype)[: tensor.shape[0]]


def pieces(made):
    """(name, tensor) of everything that training goes on from, as this rank has it."""
    for name, parameter in made.model.named_parameters():
        yield f"model/{name}", parameter.detach()
        for key, value in made.optimizer.state[parameter].items():
            yield f"optimizer/{name}/{key}", value


def contents(made):
    """Everything that training goes on from, whole, by name; collective."""
    return {name: whole(value) for name, value in pieces(made)}


def save(folder):
    """Every stage, with the kinds in turn; returns what each saved."""
    saved, count = {}, groups.world_size()
    for stage in STAGES:
        kind = KINDS[(5 * count + stage) % len(KINDS)]
        made = engine(kind, stage, seed=1)
        train(made, 2)
        made.save(folder / f"{kind}-{stage}-{count}")
        saved[kind, stage] = contents(made)
        sharding_of(made.model).close()
    return saved


def load(folder, expected):
    """Loads what `expected` ranks saved into other stages, and says what differs."""
    wrong = []
    for (ranks, kind, stage), values in expected.items():
        to = STAGES[(stage + ranks + groups.world_size()) % 4]
        made = engine(kind, to, seed=2)
        made.load(folder / f"{kind}-{stage}-{ranks}")
        found = contents(made)
        if found.keys() != values.keys():
            wrong.append(f"{kind} {stage}→{to}: {found.keys() ^ values.keys()}")
            continue
        for name, value in values.items():
            if found[name].dtype != value.dtype or not torch.equal(found[name], value):
                wrong.append(f"{kind} {stage}→{to} of {ranks} ranks: {name}")
        train(made, 1)
        sharding_of(made.model).close()
    return wrong


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    values = {}
    for count in RANKS:
        by_rank = ranks(count, save, folder)
        for (kind, stage), found in by_rank[0].items():
            values[count, kind, stage] = found
    return folder, values


@pytest.mark.parametrize("count", RANKS)
def test_any_stage_and_number_of_ranks_loads_with_any_other(ranks, saved, count):
    folder, values = saved
    for wrong in ranks(count, load, folder, values):
        assert wrong == []


def test_one_process_reads_what_several_wrote(saved):
    folder, values = saved
    for (ranks, kind, stage), expected in values.items():
        loaded = checkpoint.load(folder / f"{kind}-{stage}-{ranks}")
        for name, value in expected.items():
            assert torch.equal(loaded.tensors[name], value), (ranks, kind, stage, name)
        files = os.listdir(loaded.path)
        assert stage == 0 or sum("tensors-" in name for name in files) == ranks
        assert loaded.tensors["model/head.weight"] is loaded.tensors["model/embed.weight"]


def test_export_takes_exact_masters_one_tensor_at_a_time(saved, tmp_path):
    folder, values = saved
    for (ranks, kind, stage), expected in values.items():
        path = tmp_path / f"{kind}-{stage}-{ranks}.safetensors"
        names = checkpoint.export_weights(folder / f"{kind}-{stage}-{ranks}", path)
        exported = load_file(path)
        assert sorted(exported) == names
        for name, value in exported.items():
            known = "embed.weight" if name == "head.weight" else name
            master = expected.get(f"optimizer/{known}/master")
            rest = expected.get(f"optimizer/{known}/remainder")
            if rest is not None:
                master = masters.join(expected[f"model/{known}"], rest)
            if master is None:
                master = expected.get(f"model/{known}", value).float()
            assert value.dtype == torch.float32
            assert torch.equal(value, master), (kind, name)


def test_damage_to_one_ranks_part_is_named(ranks, saved, tmp_path):
    folder, values = saved
    key = next(key for key in values if key[0] == 3 and key[2] == 3)
    path = checkpoint.load(folder / f"{key[1]}-3-3").path
    copied = tmp_path / path.name
    shutil.copytree(path, copied)
    file = copied / "tensors-00001-00000.safetensors"
    data = bytearray(file.read_bytes())
    manifest = json.loads((copied / "manifest.json").read_text())
    data[manifest["tensors"]["model/embed.weight"]["parts"][1]["begin"]] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        CorruptError,
        match=r"tensors-00001-00000\.safetensors: tensor 'model/embed.weight' is damaged",
    ):
        checkpoint.load(copied)
    for told in ranks(2, damaged, copied, key[1]):
        assert "tensors-00001-00000.safetensors: tensor '" in told


def shared_state(folder, saves):
    """State that is no parameter's, under a parameter's name, with as many rows."""
    made = engine("momentum", 3, seed=1)
    if saves:
        made.optimizer.state["few"] = {"kept": torch.arange(2.0), "count": 3}
        train(made, 1)
        made.save(folder)
    else:
        made.load(folder)
        train(made, 1)
    found = made.optimizer.state["few"]
    sharding_of(made.model).close()
    return found["count"], found["kept"].tolist()


def test_state_of_no_parameter_is_whole_on_every_rank(ranks, tmp_path):
    for count, saves in ((3, True), (2, False), (1, False)):
        assert ranks(count, shared_state, tmp_path, saves) == [(3, [0.0, 1.0])] * count


def damaged(path, kind):
    made = engine(kind, 3, seed=2)
    with pytest.raises(CorruptError) as found:
        made.load(path)
    return str(found.value)


def full_disk(folder, dies):
    made = engine("adamw", 3, seed=1)
    train(made, 1)
    made.save(folder)
    train(made, 1)
    real = crew.write_part

    def fail(*args, **keywords):
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, "No space left on device")

    if groups.rank() == 1:
        crew.write_part = fail
    told = ""
    try:
        made.save(folder)
    except LeZeroError as error:
        told = str(error)
    crew.write_part = real
    train(made, 1)
    made.save(folder)
    return told, [path.name for path in list_generations(folder)], os.listdir(folder)


def test_a_full_disk_on_one_rank_is_told_on_all_and_training_goes_on(ranks, tmp_path):
    for told, steps, listed in ranks(3, full_disk, tmp_path, False):
        assert "rank 1: " in told
        assert "the disk is full" in told
        assert steps == ["step-00000001", "step-00000003"] == sorted(listed)


def test_a_rank_that_dies_in_the_middle_leaves_no_half_generation(ranks, tmp_path):
    with pytest.raises(AssertionError, match="rank 1 was killed by SIGKILL"):
        ranks(3, full_disk, tmp_path, True)
    assert [path.name for path in list_generations(tmp_path)] == ["step-00000001"]
    checkpoint.load(tmp_path)


def one_cannot(folder):
    """Rank 0 gives a document that cannot be stored, and later the ranks are at unlike steps."""
    told, rank = [], groups.rank()

    def tell(step, error):
        told.append((step, str(error)))

    with checkpoint.Saver(folder, together=True, on_error=tell) as saver:
        for step in (1, 2, 3, 4):
            own = {f"own/{rank}": torch.full((3,), float(step))}
            documents = {"state": {1} if step == 1 and rank == 0 else step}
            try:
                saver.save(step + 10 * (rank if step == 3 else 0), {}, documents, own)
            except FileError as error:
                told.append(str(error))
            saver.wait()
    return told


def test_a_rank_that_cannot_save_is_told_of_and_steps_never_mix(ranks, tmp_path):
    first, second = ranks(2, one_cannot, tmp_path)
    unlike = "rank 0 saves step 3, but rank 1 step 13; call save on every rank at the same steps"
    why = "documents.state: set cannot be written as JSON"
    assert sorted(first, key=str) == sorted([why, (1, f"rank 0: {why}"), (3, unlike)], key=str)
    assert second == [(1, f"rank 0: {why}"), (13, unlike)]
    assert [path.name for path in list_generations(tmp_path)] == ["step-00000002", "step-00000004"]
    for step in (2, 4):
        loaded = checkpoint.load(tmp_path / f"step-0000000{step}")
        assert loaded.documents == {"state": step}
        assert all((loaded.tensors[f"own/{rank}"] == step).all() for rank in range(2))


def no_step(folder):
    """One rank after the other gives a step that is none."""
    told, rank = [], groups.rank()

    def tell(step, error):
        told.append(f"{step}: {error}")

    with checkpoint.Saver(folder, together=True, on_error=tell) as saver:
        for wrong in (0, 1):
            try:
                saver.save(-1 if rank == wrong else 1, {}, {}, supersede=True)
            except FileError as error:
                told.append(str(error))
            saver.wait()
    return told


def test_a_step_that_is_none_is_told_on_every_rank(ranks, tmp_path):
    why = "step -1: allowed is an integer from 0"
    for rank, told in enumerate(ranks(2, no_step, tmp_path)):
        heard = [f"{-1 if rank == wrong else 1}: rank {wrong}: {why}" for wrong in (0, 1)]
        assert sorted(told) == sorted([why, *heard])


def hybrid(folder):
    """Two copies, each split over two neighbours."""
    saved = {}
    for stage in (1, 3):
        made = engine("adamw", stage, seed=1, mesh=Mesh({"replicate": 2, "shard": 2}))
        train(made, 2)
        made.save(folder / str(stage))
        saved[stage] = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
            for name, value in pieces(made)
        }
        sharding_of(made.model).close()
    return saved


def from_hybrid(folder, expected):
    wrong = []
    for stage, values in expected.items():
        made = engine("adamw", 4 - stage, seed=2)
        made.load(folder / str(stage))
        found = contents(made)
        assert found.keys() == values.keys()
        wrong += [name for name, value in values.items() if not torch.equal(found[name], value)]
        sharding_of(made.model).close()
    return wrong


def test_what_a_mesh_of_two_axes_saved_loads_with_any_number_of_ranks(ranks, tmp_path):
    saved = ranks(4, hybrid, tmp_path)[3]
    for count in (1, 3):
        assert ranks(count, from_hybrid, tmp_path, saved) == [[]] * count
