"""Times saves and loads of a model with its AdamW state in each form."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoint_parts.forms import LOAD, SAVE, TEMPLATE, Values


def gpt_state(layers: int, dim: int, vocab: int) -> Values:
    shapes = {"embed.weight": (vocab, dim), "norm.weight": (dim,)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.attention.qkv.weight": (3 * dim, dim),
            f"layers.{i}.attention.out.weight": (dim, dim),
            f"layers.{i}.mlp.up.weight": (4 * dim, dim),
            f"layers.{i}.mlp.down.weight": (dim, 4 * dim),
            f"layers.{i}.norm1.weight": (dim,),
            f"layers.{i}.norm2.weight": (dim,),
        }
    values: Values = {}
    for name, shape in shapes.items():
        values[f"model/{name}"] = torch.randn(shape)
        values[f"optimizer/{name}/step"] = torch.tensor(1.0)
        values[f"optimizer/{name}/exp_avg"] = torch.randn(shape)
        values[f"optimizer/{name}/exp_avg_sq"] = torch.rand(shape)
    return values


def stalls(form: str, rounds: int, folder: Path, quick: bool) -> dict[str, Any]:
    """Seconds: how long the loop stands still, until the save is complete, and for a load."""
    values = gpt_state(2, 256, 512) if quick else gpt_state(8, 512, 1536)
    TEMPLATE.update(values)
    stall, whole, read = [], [], []
    start, finish, saved = saver_of(form, folder)
    for index in range(rounds + 1):
        began = time.perf_counter()
        start(index, values)
        stalled = time.perf_counter() - began
        finish()
        took = time.perf_counter() - began
        began = time.perf_counter()
        loaded = LOAD[form.removesuffix(" async")](saved(index))
        for name, tensor in loaded.items():
            values[name].copy_(tensor)
        if index:  # the first round allocates and reads code
            stall.append(stalled)
            whole.append(took)
            read.append(time.perf_counter() - began)
    finish()
    size = sum(t.numel() * t.element_size() for t in values.values())
    return {"stall": stall, "save": whole, "load": read, "bytes": size}


Parts = tuple[Callable[[int, Values], object], Callable[[], object], Callable[[int], Path]]


def saver_of(form: str, folder: Path) -> Parts:
    """(start a save, wait for it, where it is). The peers save in place, synced like LeZero."""
    if form == "lezero":
        from lezero.checkpoint import Saver

        saver = Saver(folder, keep=2)
        return lambda i, v: saver.save(i, v, {}), saver.wait, lambda i: folder

    if form == "DCP async":
        return async_dcp(folder)

    def start(index: int, values: Values) -> None:
        shutil.rmtree(folder / str(index - 2), ignore_errors=True)
        (folder / str(index)).mkdir()
        SAVE[form](folder / str(index), values)
        for path in (folder / str(index)).rglob("*"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    return start, lambda: None, lambda i: folder / str(i)


def async_dcp(folder: Path) -> Parts:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    pending: list[Any] = []

    def start(index: int, values: Values) -> None:
        shutil.rmtree(folder / str(index - 2), ignore_errors=True)
        pending.append(dcp.async_save(dict(values), checkpoint_id=folder / str(index)))

    def finish() -> None:
        while pending:
            pending.pop().result()

    return start, finish, lambda i: folder / str(i)
