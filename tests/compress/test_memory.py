"""Calibration holds little more than the model; see benchmarks/quantization_memory.py for 10⁹."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import hessians, layer, speed, work
from lezero.compress.quantize.hessians import Room
from lezero.compress.quantize.methods import Nearest
from lezero.compress.quantize.parts import at_once
from lezero.compress.quantize.work import Work
from lezero.models import Transformer, TransformerConfig
from lezero.ops.quantize import Grid
from lezero.profiler import MemorySampler
from tests.ranks import RankPool

MIB = 1 << 20


def llama(layers: int, dim: int, ffn: int) -> Transformer:
    shape = {"dim": dim, "layers": layers, "heads": 4, "kv_heads": 2, "ffn": ffn}
    return Transformer(TransformerConfig(**shape, vocab=64, context=64)).bfloat16()


def peaks(layers: int) -> dict[str, int]:
    """In a process of its own: bytes above the model, and what is allowed."""
    torch.set_num_threads(1)
    speed._SECONDS, speed._ROUNDS, speed._MOST_RUNS = 0.0, 1, 1
    x = [torch.randint(0, 64, (1, 32)) for _ in range(2)]
    scheme = lz.Int4Weight(group=64, method="gptq", scales="minmax")
    # What every process holds once: libraries, kernels.
    lz.quantize_(llama(2, 64, 64), scheme, data=x, objective="size")
    made = llama(layers, 512, 1024)
    with torch.no_grad(), MemorySampler() as activations:
        made(x[0])
    block = sum(p.nbytes for p in made.layers[0].parameters())
    whole = sum(p.nbytes for p in made.parameters())
    with MemorySampler() as memory:
        lz.quantize_(made, scheme, data=x, objective="size", filter=["*.up_proj", "*.down_proj"])
    bound = 2 * block + 1024 * 1024 * 4 + activations.above
    return {"above": memory.above, "whole": whole, "bound": bound}


def test_the_peak_stays_near_the_model(ranks: RankPool) -> None:
    (found,) = ranks(1, peaks, 8)
    # Of this small model the temporary values of one layer count more than of a large one, and so
    # do pages of libraries that are touched for the first time.
    assert found["above"] <= found["bound"] + 12 * MIB, found
    assert found["above"] < found["whole"], found


class Experts(nn.Module):
    """A block of experts, each of which gets two of the tokens."""

    def __init__(self, count: int, dim: int, hidden: int) -> None:
        super().__init__()
        make = (nn.Sequential(nn.Linear(dim, hidden), nn.Linear(hidden, dim)) for _ in range(count))
        self.experts = nn.ModuleList(make)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.chunk(len(self.experts))
        return x + torch.cat([e(some) for e, some in zip(self.experts, tokens, strict=True)])


def experts(blocks: int, count: int, dim: int) -> nn.Sequential:
    return nn.Sequential(*(Experts(count, dim, 32) for _ in range(blocks)))


GPTQ = lz.Int4Weight(group=32, method="gptq", scales="minmax")


def peaks_of_experts(count: int) -> dict[str, int]:
    """In a process of its own: bytes above the model, and what is allowed."""
    torch.set_num_threads(1)
    speed._SECONDS, speed._ROUNDS, speed._MOST_RUNS = 0.0, 1, 1
    lz.quantize_(experts(2, 2, 64), GPTQ, data=torch.randn(4, 64), objective="size")
    made, x = experts(2, count, 512).bfloat16(), torch.randn(2 * count, 512).bfloat16()
    with torch.no_grad(), MemorySampler() as activations:
        made(x)
    block = sum(p.nbytes for p in made[0].parameters())
    with MemorySampler() as memory:
        lz.quantize_(made, GPTQ, data=x, objective="size")
    return {"above": memory.above, "bound": 2 * block + 512 * 512 * 4 + activations.above}


def test_hessians_of_experts_are_not_held_at_once(ranks: RankPool) -> None:
    (found,) = ranks(1, peaks_of_experts, 64, timeout_s=180)
    assert found["above"] <= found["bound"] + 12 * MIB < 64 * MIB, found


def test_codes_do_not_depend_on_how_many_hessians_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = experts(2, 3, 64), torch.randn(96, 64)
    states = []
    for most in (float("inf"), 64 * 64 * 4):
        monkeypatch.setattr(work, "room_of_block", lambda *_, most=most: Room(most))
        made = copy.deepcopy(model)
        lz.quantize_(made, GPTQ, data=x, objective="size")
        states.append(made.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def rounding(words: int) -> int:
    """In a process of its own: bytes that finding the codes of a bf16 vocabulary takes."""
    torch.set_num_threads(1)
    weight = torch.randn(words, 512).bfloat16()
    assert weight.numel() > 8 * at_once(weight.device)
    layer._codes(Nearest(), weight[:64], Grid("int8"), "minmax", None)
    with MemorySampler() as memory:
        layer._codes(Nearest(), weight, Grid("int8"), "minmax", None)
    return memory.above


def test_no_copy_of_a_whole_vocabulary_is_made_in_fp32(ranks: RankPool) -> None:
    words = 1 << 17
    (above,) = ranks(1, rounding, words)
    # A byte each is the codes themselves, and a copy would make five. Scales that were kept part by
    # part took up to 4, when they lay in the holes that glibc would have used again.
    assert above < 1.5 * words * 512, above / MIB


def test_layers_outside_of_blocks_have_few_hessians_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(5) for part in (nn.Linear(64, 64), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(256, 64)
    wanted = model(x).detach()
    captured: list[int] = []
    real = Work._capture

    def capture(self: Work, sites: Any, *rest: Any) -> Any:
        captured.append(len(sites))
        return real(self, sites, *rest)

    monkeypatch.setattr(Work, "_capture", capture)
    errors = []
    for most, parts in ((1 << 28, [5]), (2 * 4 * 64 * 64, [2, 2, 1]), (1, [1] * 5)):
        monkeypatch.setattr(hessians, "_OUTSIDE", most)
        made = copy.deepcopy(model)
        captured.clear()
        lz.quantize_(made, lz.Int4Weight(group=32, method="gptq"), data=x, objective="size")
        assert captured == parts
        assert len(lz.quantization_report(made).layers) == 5
        errors.append(float((made(x) - wanted).norm() / wanted.norm()))
    assert max(errors) < 1.2 * errors[0] < 0.3


def test_layers_that_share_a_weight_have_a_hessian_each(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model[1].weight = model[0].weight
    held: list[int] = []
    real = Work._looked_at_all

    def looked(self: Work, *args: Any) -> Any:
        found, ran = real(self, *args)
        records = {id(one): one for one in found.inputs.values()}.values()
        held.append(sum(one.hessian.nbytes for one in records if one.hessian is not None))
        return found, ran

    monkeypatch.setattr(Work, "_looked_at_all", looked)
    monkeypatch.setattr(hessians, "_OUTSIDE", 2 * 4 * 64 * 64)
    scheme = lz.Int4Weight(group=32, method="gptq")
    lz.quantize_(model, scheme, data=torch.randn(256, 64), objective="size")
    assert held == [2 * 4 * 64 * 64] * 2


def test_parts_without_a_hessian_are_no_parts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessians, "_OUTSIDE", 1)
    model = nn.Sequential(nn.Embedding(30, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = [torch.randint(0, 30, (64,)) for _ in range(3)]
    lz.quantize_(model, lz.Int4Weight(group=32, method="gptq"), data=x, objective="size")
    assert not [note for note in lz.quantization_report(model).notes if "batches ran" in note]
