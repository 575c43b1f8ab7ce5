"""Damages checkpoints in each form and counts the loads that succeed with other values."""

from __future__ import annotations

import collections
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from checkpoint_parts.forms import LOAD, SAVE, TEMPLATE, Values

SEED = 20
KINDS = ("bit flip", "cut", "grown", "zeroed", "swapped", "deleted")


def trained(steps: int) -> Values:
    """Weights and AdamW state of a small model after `steps` steps, by name."""
    from lezero.checkpoint import pack_optimizer, pack_random

    torch.manual_seed(SEED)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.LayerNorm(96), torch.nn.Linear(96, 32)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    state, _ = pack_optimizer(optimizer, dict(model.named_parameters()))
    weights = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    return {n: t.detach().clone() for n, t in {**weights, **state, **pack_random()[0]}.items()}


def damage(kind: str, folder: Path, other: Path, chance: random.Random) -> str:
    """Damages one file of the checkpoint in `folder`; `other` holds the generation before it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    size = [p.stat().st_size for p in files]
    # half of the time any file, half of the time by size: small files hold the structure
    path = chance.choice(files) if chance.random() < 0.5 else chance.choices(files, size)[0]
    raw = bytearray(path.read_bytes())
    at = chance.randrange(len(raw))
    if kind == "bit flip":
        raw[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del raw[at:]
    elif kind == "grown":
        raw += bytes(chance.choices(range(256), k=chance.randint(1, 64)))
    elif kind == "zeroed":
        end = min(len(raw), at + chance.choice((64, 512, 4096)))
        raw[at:end] = bytes(end - at)
    elif kind == "swapped":
        raw = bytearray((other / path.relative_to(folder)).read_bytes())
    if kind == "deleted":
        path.unlink()
    else:
        path.write_bytes(raw)
    return f"{kind} in {path.name} at {at}"


def equal(a: Values, b: Values) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and a[n].numpy().tobytes() == b[n].numpy().tobytes()
        for n in a
    )


def corrupt(form: str, tries: int, folder: Path) -> dict[str, Any]:
    """Outcomes of `tries` damages of each kind: refused, harmless or silently wrong."""
    old, new = trained(3), trained(6)
    TEMPLATE.update(new)
    for name, values in (("old", old), ("new", new)):
        (folder / name).mkdir()
        SAVE[form](folder / name, values)
    assert equal(LOAD[form](folder / "new"), new)
    if form == "lezero":  # the generation before it is of another step, in the same root
        shutil.rmtree(folder / "old")
        old_root(folder, old, new)
    chance = random.Random(SEED)
    outcomes = {kind: collections.Counter[str]() for kind in KINDS}
    for kind in KINDS:
        for _ in range(tries):
            target = folder / "tried"
            shutil.copytree(folder / "new", target)
            what = damage(kind, damaged_part(form, target), damaged_old(form, folder), chance)
            outcome = judged(form, target, old, new)
            if outcome == "silently wrong" and form == "lezero":
                print(f"SILENTLY WRONG: {what}", file=sys.stderr)
            outcomes[kind][outcome] += 1
            shutil.rmtree(target)
    return {kind: dict(counter) for kind, counter in outcomes.items()}


def old_root(folder: Path, old: Values, new: Values) -> None:
    from lezero.files import write_generation

    shutil.rmtree(folder / "new")
    for step, values in ((1, old), (2, new)):
        document = {"state": {"step": step}}
        write_generation(folder / "new", step, tensors=values, documents=document)


def damaged_part(form: str, target: Path) -> Path:
    return target / "step-00000002" if form == "lezero" else target


def damaged_old(form: str, folder: Path) -> Path:
    return folder / "new" / "step-00000001" if form == "lezero" else folder / "old"


def judged(form: str, target: Path, old: Values, new: Values) -> str:
    try:
        right = equal(LOAD[form](target), new)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # any error is loud; DCP's derive from BaseException
        outcome = "refused"
    else:
        outcome = "harmless" if right else "silently wrong"
    if form == "lezero" and not falls_back(target, old, new, outcome):
        return "silently wrong"
    return outcome


def falls_back(target: Path, old: Values, new: Values, outcome: str) -> bool:
    """The root as a whole must give the newest good generation, and say what it refused."""
    from lezero.checkpoint import load

    loaded = load(target)
    if outcome == "harmless":
        return loaded.step == 2 and equal(loaded.tensors, new)
    named = loaded.rejected and loaded.rejected[0][0].name == "step-00000002"
    return bool(named) and loaded.step == 1 and equal(loaded.tensors, old)
