"""The forms that a step can run in: the same numbers and names, refused where they cannot be."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lezero.core import groups
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.memory import pool as memory_pool
from lezero.ops.attention import available
from lezero.optim import AdamW
from lezero.train import speed
from lezero.train.engine import Engine
from lezero.train.loss import next_token_loss

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.line(x).transpose(1, 2)).transpose(1, 2)))


class PlainBlock(nn.Module):
    """Quick to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.relu(self.line(x)))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 11, (2, 4, 8), generator=generator)
    return {"tokens": tokens, "targets": targets}


def test_the_compiler_is_asked_with_a_program_of_one_line(monkeypatch):
    def broken(function):
        raise RuntimeError("no C++ compiler found\nand more lines")

    monkeypatch.setattr(torch, "compile", broken)
    assert speed.compiler_problem(CPU) == "no C++ compiler found"


def test_the_pool_is_a_fact_of_this_machine_and_not_replayed(monkeypatch):
    then = Decisions()
    then.record("host memory pool", "on", reason="freed blocks are kept")
    now = Decisions.from_json(then.to_json())
    monkeypatch.setenv("LEZERO_POOL", "0")
    assert speed.host_pool(now, now) is None
    assert now.records["host memory pool"].chosen == "off"


def test_the_pool_ends_with_its_engine():
    def engine():
        model = Model()
        return Engine(model, AdamW(model), loss=next_token_loss, precision="fp32", compile="off")

    gc.collect()
    first, others = engine(), memory_pool._enabled - 1
    second = engine()
    pool = second.pool
    second.train_step(batch())
    del second
    gc.collect()
    assert (pool.enabled, memory_pool._enabled) == (False, others + 1)
    pool.disable()
    assert first.pool.enabled
    del first
    gc.collect()
    assert memory_pool._enabled == others


def test_blocks_that_the_user_compiled_stay_compiled():
    model = Model()
    for layer in model.layers:
        layer._compiled_call_impl = layer._call_impl  # as `layer.compile()` sets it
    own = [layer._compiled_call_impl for layer in model.layers]
    assert not speed.can_compile_blocks(model, "auto")
    assert speed.can_compile_blocks(model, "blocks")
    forms = speed.Forms("blocks", "torch", model, next_token_loss)
    for turn in (forms.on, forms.off):
        turn()
        assert [layer._compiled_call_impl for layer in model.layers] == own


def test_what_an_engine_compiled_ends_with_it_or_with_the_next_engine(monkeypatch):
    model, ran = Model(block=PlainBlock), []

    def counted(function, options):
        return lambda *args: (ran.append(1), function(*args))[1]

    def made(form):
        return Engine(
            model, AdamW(model), loss=next_token_loss, precision="fp32", compile=form, pool=False
        )

    def compiled_calls(run):
        before = len(ran)
        run()
        return len(ran) - before

    monkeypatch.setattr(speed.torch, "compile", counted)
    monkeypatch.setattr(speed, "compiler_problem", lambda place: "")
    engines = [made("blocks")]
    assert compiled_calls(lambda: engines[0].train_step(batch())) == 3
    engines.append(made("off"))
    assert compiled_calls(lambda: engines[1].evaluate([batch()])) == 0
    for turn, calls in ((1, 0), (0, 3), (1, 0)):
        assert compiled_calls(lambda turn=turn: engines[turn].train_step(batch())) == calls

    engines[1] = made("blocks")
    engines[1].train_step(batch())
    del engines[0]
    gc.collect()
    assert compiled_calls(lambda: model(batch()["tokens"])) == 3
    own = model.layers[0]._call_impl
    model.layers[0]._compiled_call_impl = own  # as `layer.compile()` sets it
    assert compiled_calls(lambda: engines[0].train_step(batch())) == 2
    engines.clear()
    gc.collect()
    assert [layer._compiled_call_impl for layer in model.layers] == [own, None, None]


def test_forms_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="compile: got 'fast', allowed is auto, off"):
        speed.check_asked(Model(), "fast", "auto")
    with pytest.raises(ConfigError, match="attention: got 'fast', allowed is auto, torch, lezero"):
        speed.check_asked(Model(), "off", "fast")
    with pytest.raises(ConfigError, match=r"compile: got 'blocks', but the model has no"):
        speed.check_asked(nn.Linear(4, 11), "blocks", "auto")
    for form in ("auto", "off", "eager", "blocks", "step"):
        speed.check_asked(Model(), form, "torch")


@pytest.fixture
def compiler(monkeypatch):
    """What torch's compiler leaves behind by itself: a variable and a progress bar's thread."""
    import tqdm

    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "0")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    yield
    torch._dynamo.reset()


def test_compiled_forms_give_the_numbers_of_the_eager_one_and_keep_names(compiler):
    outcome = {}
    for form in speed.FORMS:
        torch.manual_seed(0)
        model = Model(block=PlainBlock)
        names = list(model.state_dict())
        engine = Engine(
            model, AdamW(model, lr=1e-2), loss=next_token_loss, precision="fp32", compile=form
        )
        losses = [engine.train_step(batch(i)).loss for i in range(3)]
        assert list(model.state_dict()) == names
        compiled = [layer._compiled_call_impl is not None for layer in model.layers]
        assert all(compiled) if form == "blocks" else not any(compiled)
        assert engine.decisions.records["compile"].overridden
        outcome[form] = losses
    assert outcome["blocks"] == pytest.approx(outcome["eager"], rel=1e-5)
    assert outcome["step"] == pytest.approx(outcome["eager"], rel=1e-5)


@pytest.mark.parametrize("form", ["blocks", "step"])
def test_compiled_forms_run_the_hooks_that_are_added_later(compiler, monkeypatch, form):
    compile = torch.compile
    monkeypatch.setattr(
        speed.torch, "compile", lambda function, options: compile(function, backend="eager")
    )
    monkeypatch.setattr(speed, "compiler_problem", lambda place: "")
    torch._dynamo.reset()
    model, seen = Model(block=PlainBlock), []
    engine = Engine(model, AdamW(model), loss=next_token_loss, precision="fp32", compile=form)
    engine.train_step(batch())
    handle = model.layers[1].line.register_forward_hook(lambda *_: seen.append("ran"))
    engine.train_step(batch())
    assert seen == ["ran"]
    handle.remove()
    engine.train_step(batch())
    assert seen == ["ran"]


class Recomputed(nn.Module):
    """One layer of attention, whose activations are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False).square().mean()


@pytest.mark.skipif(not available(), reason="no kernel of attention for this processor")
@pytest.mark.parametrize("form", ["off", "step"])
def test_activations_are_recomputed_with_the_attention_that_made_them(compiler, form):
    torch.manual_seed(0)
    model = Recomputed()
    engine = Engine(model, AdamW(model), precision="bf16", compile=form, attention="lezero")
    result = engine.train_step(torch.randn(8, 64, 64))
    assert result.skipped is None
    assert result.grad_norm > 0


def test_repeated_blocks_are_the_longest_list_of_one_class():
    model = Model()
    assert speed.repeated_blocks(model) == list(model.layers)
    assert speed.repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    assert speed.repeated_blocks(nn.Linear(2, 2)) == []


def test_ranks_of_one_machine_share_the_memory_that_is_kept_free(monkeypatch):
    def pool(limit):
        return SimpleNamespace(enable=lambda: True, disable=lambda: None, bound=limit)

    monkeypatch.setattr(speed, "HostPool", pool)
    monkeypatch.setattr(speed, "memory_limit", lambda: 8 << 30)
    monkeypatch.setattr(groups, "ranks_here", lambda: 4)
    made = speed.host_pool(decisions := Decisions(), decisions)
    assert made is not None
    assert made.bound == 2 << 30
    assert "up to 2.0 GiB" in decisions.records["host memory pool"].reason


def a_rank_without_a_compiler():
    """What a form that was asked for, and one that a resumed run had, become on each rank."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        mine = "no C++ compiler found" if groups.rank() else ""
        patch.setattr(speed, "compiler_problem", lambda place: mine)
        try:
            speed.check_compiler("blocks", CPU, Decisions())
        except ConfigError as error:
            told.append(str(error))
        decisions = Decisions()
        decisions.record("compile", "blocks", reason="faster")
        resumed = Decisions.from_json(decisions.to_json())
        speed.check_compiler(None, CPU, resumed)
        told.append("compile" in resumed.replay)
    return told


def test_a_rank_that_cannot_compile_counts_for_all(ranks):
    first, second = ranks(2, a_rank_without_a_compiler)
    assert first == second
    assert "torch cannot compile here (no C++ compiler found (rank 1))" in first[0]
    assert first[1] is False
