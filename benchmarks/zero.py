"""ZeRO costs no more than DDP in time, and a fraction in memory.

A GPT of 203M parameters (16 layers, 1024 wide, 256 tokens, one sequence a rank) on two ranks of one
thread each, in bf16 with fp32 masters and fused AdamW. `step_s` is the median over the steps, the
slower rank's; `bytes/param` is what a rank holds at the end of a step, gradients included, above
what it held after its imports (pages that ranks share count in part), over the parameters of the
whole model. `lowbit` is stage 3 on bf16 weights with remainder masters and 8-bit state. With
`--device cuda`: one GPU, a model of 1.3B parameters, 32 sequences a step, also the peak of memory
(`peak_gib`) and the model's FLOPs over those of large bf16 products (`mfu`). Peers (`make peers`)
run the same loop: torch's DDP and FSDP2, DeepSpeed's stages 1 to 3. `small` is a GPT of 2M (4
layers, 192 wide), whose parameters are so small that what each of them costs by itself shows.

Last line: `zero3_step_vs_ddp`, `zero12_step_vs_ddp` (the slower of both), the same of the small
model, the bytes, and how far the forecast of memory and time is from what was measured at any stage
(`_zero_forecast.py`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from _table import Result, arguments, columns, compare, emit, finish, peer, side
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, LENGTH = 512, 256
BATCH = {"cpu": 1, "cuda": 32}
SIZES = {"full": (16, 1024), "quick": (4, 256), "cuda": (24, 2048), "small": (4, 192)}
SMALL = ("ddp small", "zero1 small", "zero2 small", "zero3 small")
STAGES = ("zero0", "zero1", "zero2", "zero3")
DEEPSPEED = ("deepspeed1", "deepspeed2", "deepspeed3")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        y_BHTE = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTE.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(tokens_BT) + self.places.weight
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, adamw(model)


def plain(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, adamw(model)


def fsdp2(model: GPT) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, adamw(model)


def zero(stage: int) -> Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]:
    def make(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        import lezero as lz

        lz.shard_(model, lz.Zero(stage=stage, compute="bf16"))
        return model, adamw(model)

    return make


def lowbit(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    import lezero as lz
    from lezero.optim import AdamW8bit

    lz.shard_(model.bfloat16(), lz.Zero(stage=3))
    return model, AdamW8bit(model.parameters(), lr=1e-4, masters="remainder")


def deepspeed(stage: int) -> Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]:
    def make(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed import initialize

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, optimizer, *_ = initialize(model=model, optimizer=adamw(model), config=config)
        return engine, optimizer

    return make


SIDES: dict[str, Callable[..., tuple[nn.Module, torch.optim.Optimizer]]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    **{name: zero(int(name[-1])) for name in STAGES},
    "lowbit": lowbit,
    **{name: deepspeed(int(name[-1])) for name in DEEPSPEED},
    "plain": plain,
}


def resident() -> int:
    """Bytes this process holds: its own pages, and its part of those that ranks share.

    Without pages of files: which of the libraries' it holds depends on who else runs.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))


def train(name: str, size: str, steps: int, device: str) -> dict[str, float]:
    """One rank's figures."""
    torch.set_num_threads(1)
    join(name, device)
    if device == "cpu":
        importlib.import_module("torch._dynamo")  # the first optimizer step imports it
    before, layers_width = resident(), SIZES[size]
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(*layers_width)
    parameters = sum(p.numel() for p in model.parameters())
    model, optimizer = SIDES[name](model)
    cast = name in ("ddp", "plain")
    times, held = [], 0
    for step in range(steps + 2):
        tokens = torch.randint(0, VOCAB, (BATCH[device], LENGTH + 1), device=device)
        if step >= 2:
            dist.barrier()
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=cast):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        if name in DEEPSPEED:
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
        if device != "cpu":
            torch.accelerator.synchronize()
        elif step:
            held = max(held, resident() - before)
        if name not in DEEPSPEED:  # its step does it
            optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    found = {"step_s": statistics.median(times[2:]), "bytes_per_param": held / parameters}
    if device != "cpu":
        peak = torch.accelerator.max_memory_allocated()
        found |= {"bytes_per_param": peak / parameters, "peak_gib": peak / 2**30}
        found["mfu"] = (
            BATCH[device] * model_flops(*layers_width) / found["step_s"] / products_per_s(device)
        )
    leave(name)
    return found


def model_flops(layers: int, width: int) -> int:
    """Of a step of one sequence: 6 for each token and weight that multiplies, and attention's as if
    every pair were computed (Chowdhery et al., "PaLM" (2022), appendix B)."""
    weights = 12 * layers * width**2 + VOCAB * width
    return LENGTH * (6 * weights + 12 * layers * width * LENGTH)


def products_per_s(device: str) -> float:
    """FLOP/s of large bf16 products, the fastest of ten rounds."""
    size, times = 8192, []
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    for _ in range(10):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(a, b)
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    return 10 * 2 * size**3 / min(times)


def join(name: str, device: str) -> None:
    """Joins the ranks; what a side imports is not what is measured."""
    if name in DEEPSPEED:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        importlib.import_module("deepspeed").init_distributed("gloo", verbose=False)
        return
    import lezero.optim  # noqa: F401
    from lezero.core import groups

    groups.join(backend="gloo" if device == "cpu" else None)
    if not groups.active():
        groups.join_alone()


def leave(name: str) -> None:
    if name in DEEPSPEED:
        dist.destroy_process_group()
        return
    from lezero.core import groups

    groups.leave()


def start(ranks: int, stdout: int | None = None) -> list[subprocess.Popen[str]]:
    """Runs this command again as the ranks of one side, each in its own process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=env | {"RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(ranks)},
            stdout=stdout,
            text=True,
        )
        for r in range(ranks)
    ]


def launch(ranks: int) -> None:
    """Starts the ranks of one side and prints the slowest's figures."""
    started = start(ranks, subprocess.PIPE)
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a rank failed")
    every = [json.loads(text.strip().splitlines()[-1]) for text in said]
    emit(**{key: max(one[key] for one in every) for key in every[0]})


def bitwise(steps: int) -> bool:
    """Whether all stages train alike, bit for bit, on every rank, over some steps with clipping."""
    from lezero.core import groups

    if "RANK" not in os.environ:
        return True
    import hashlib

    import lezero as lz
    from lezero.parallel.zero import full_parameters

    torch.set_num_threads(1)
    groups.join(backend="gloo")
    digests = []
    for stage in range(4):
        torch.manual_seed(0)
        model, optimizer = zero(stage)(GPT(2, 256))
        torch.manual_seed(1 + groups.rank())
        for _ in range(steps):
            tokens = torch.randint(0, VOCAB, (1, LENGTH + 1))
            F.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
            ).backward()
            lz.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        digest = hashlib.sha256()
        for _, tensor in full_parameters(model):
            digest.update(tensor.numpy().tobytes())
        digests.append(digest.hexdigest())
    alike = all(groups.gather_objects(len(set(digests)) == 1))
    groups.leave()
    return alike


def one_side(options: argparse.Namespace, size: str) -> None:
    """One side of the comparison, in the ranks that it needs."""
    name, _, way = options.side.partition(" ")
    ranks = int(way[1:]) if way.startswith("x") else 2 if options.device == "cpu" else 1
    if "RANK" not in os.environ:
        launch(ranks)
    elif name == "bitwise":
        emit(same=float(bitwise(5 if options.quick else 50)))
    else:
        size, steps = ("small", 60) if way == "small" else (size, 8)
        emit(**train(name, size, 4 if options.quick else steps, options.device))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", help="these sides, by comma")
    options = arguments(__doc__, parser)
    size = "quick" if options.quick else "full" if options.device == "cpu" else "cuda"
    if options.side:
        one_side(options, size)
        return
    from _zero_forecast import errors as foreseen  # it reads this file

    extra = ["--device", options.device] + (["--quick"] if options.quick else [])
    names = (
        ["ddp", "fsdp2", *DEEPSPEED, *STAGES, "lowbit"]
        if options.device == "cpu"
        else ["plain", "fsdp2", *STAGES]
    )
    if options.quick and options.device == "cpu":
        names = ["ddp", "zero2", "zero3", "lowbit"]
    if options.only:
        names = options.only.split(",")
    rounds = options.rounds or (1 if options.quick else 3)
    sides = [
        peer(__file__, name, "deepspeed", *extra)
        if name in DEEPSPEED
        else side(__file__, name, *extra)
        for name in names
    ]
    result = compare(sides, rounds=rounds)
    keys = ["step_s", "bytes_per_param"]
    if options.device != "cpu":
        keys += ["peak_gib", "mfu"]
    base = "ddp" if options.device == "cpu" else "plain"
    table = result.table(keys, base=base if base in names else None)
    if options.device != "cpu" or options.only:
        ran = [name for name in names if result.figures[name]]
        finish(table, {f"{name}_{key}": result.median(name, key) for name in ran for key in keys})
        return
    more, rates = once(options.quick, extra, result.median("zero2", "step_s"))
    small = compare([side(__file__, name, *extra) for name in SMALL], rounds=rounds)
    forecast, ahead = foreseen(options.quick, 1)
    finish(
        f"{table}\n\n{small.table(keys, base='ddp small')}\n\n{rates}\n\n{forecast}",
        {
            **against_ddp(result, names, ""),
            **against_ddp(small, SMALL, "small_"),
            "zero3_bytes_per_param": result.median("zero3", "bytes_per_param"),
            "lowbit_bytes_per_param": result.median("lowbit", "bytes_per_param"),
            "stages_bitwise": more.median("bitwise", "same") == 1.0,
            **ahead,
        },
    )


def once(quick: bool, extra: list[str], two_s: float) -> tuple[Result, str]:
    """What one round shows: whether stages train alike, and a table of tokens/s by ranks."""
    others = (1,) if quick else (1, 4)
    names = ["bitwise", *(f"zero2 x{n}" for n in others)]
    found = compare([side(__file__, name, *extra) for name in names], rounds=1)
    step_s = {n: found.median(f"zero2 x{n}", "step_s") for n in others} | {2: two_s}
    rates = [[str(n), f"{n * LENGTH / step_s[n]:.0f}"] for n in sorted(step_s)]
    return found, columns([["ranks", "tokens/s"], *rates])


def against_ddp(result: Result, names: Sequence[str], prefix: str) -> dict[str, float]:
    """Steps of stage 3, and of the slower of stages 1 and 2, over DDP's."""
    stage = {name[:5]: name for name in names if name.startswith("zero")}
    halves = [stage[key] for key in ("zero1", "zero2") if key in stage]
    slower = max(halves, key=lambda name: result.median(name, "step_s"))
    base = next(name for name in names if name.startswith("ddp"))
    return {
        f"{prefix}zero3_step_vs_ddp": result.ratio("step_s", stage["zero3"], base),
        f"{prefix}zero12_step_vs_ddp": result.ratio("step_s", slower, base),
    }


if __name__ == "__main__":
    main()
